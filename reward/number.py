r"""Numbers as people and language models write them, read exactly and in time linear in the text.

What is read (every other form reads as no number):

* digits with a decimal point: `7`, `042`, `3.0`, `.5`, `42.`; ASCII, full-width, Arabic-Indic, Devanagari and
  mathematical
* thousands grouped by commas, or by thin, figure, narrow or no-break spaces: `1,000`, `1,234.50`; LaTeX `1{,}000`,
  `1\,000`
* signs `+5`, `-7`, with U+2212, hyphens and the en dash; after a digit, a letter or a closing bracket a dash is an
  operator, so that 5-7 ends in 7
* fractions `1/2`, `\frac{1}{2}`, `\frac12` (dfrac, tfrac, cfrac), `½`; mixed numbers `1 1/2`, `1\frac{1}{2}`, `1½`
* powers of ten `1e3`, `1.5 \times 10^{3}`, with exponents of at most nine digits
* currency signs, `%` and units beside a number are passed over: 50% reads as 50, not as 0.5

What is refused on purpose, because it would be read wrongly: commas that do not group thousands (`1,2`, `12,34`,
`0,1`), several points or slashes (`1.2.3`, `1/2/2024`), a zero denominator, powers, roots and multiples of pi
(`10^5`, `\sqrt{2}`, `3\pi`), fractions with letters. A decimal comma is not read. Numbers apart from each other (`1,
2`) are separate: the last one counts.
"""

import re
from decimal import Decimal
from fractions import Fraction

Number = Decimal | Fraction  # a Fraction only where no finite decimal is equal, so that == alone compares

MAX_FRACTION_CHARS = 200  # of numerator and denominator together: bounds the arithmetic of reducing a fraction

_SPACES = "\u00a0\u2007\u2009\u202f"  # those that group thousands; an ordinary space does not
_ZEROS = (0x0660, 0x06F0, 0x0966, 0xFF10, *range(0x1D7CE, 0x1D800, 10))  # first of ten digits each
_READ_AS = (
    {zero + digit: str(digit) for zero in _ZEROS for digit in range(10)}
    | {ord(dash): "-" for dash in "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"}
    | {ord(wide): narrow for wide, narrow in zip("＋，．／％＄＾", "+,./%$^", strict=True)}
    | {
        ord(sign): rf"\frac{{{top}}}{{{bottom}}}"
        for sign, top, bottom in ("½12", "⅓13", "⅔23", "¼14", "¾34", "⅕15", "⅛18")
    }
)

# A clump is all that hangs together between two gaps; whether it is a number is judged afterwards, as a whole.
_CLUMP = rf"(?:(?<![.0-9A-Za-z])\.)?[0-9]+(?:[.,/{_SPACES}][0-9]+)*"
_PART = r"[+-]?[0-9]+(?:\.[0-9]+)?"
_TOKEN = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z)\]}%+-])[+-])?"
    r"(?:\\?[$€£¥₹]\s?)?"
    rf"(?:(?:(?P<whole>[0-9]{{1,100}})\s?)?\\[dtc]?frac\s*(?:\{{\s*(?P<top>{_PART})\s*\}}|(?P<top1>[0-9]))"
    rf"\s*(?:\{{\s*(?P<bottom>{_PART})\s*\}}|(?P<bottom1>[0-9]))"
    r"|(?P<mixed>[0-9]{1,100}) (?P<part>[0-9]{1,99}/[0-9]{1,99})(?![0-9.,/])"
    rf"|(?P<clump>{_CLUMP})(?:(?P<spaced> ?/ ?-?[0-9]+(?:\.[0-9]+)?)|[eE](?P<exponent>[+-]?[0-9]+)(?![0-9A-Za-z])"
    r"|\s?(?:\\times|\\cdot|×|\*)\s?10\s?\^\s?(?:\{(?P<power>[+-]?[0-9]+)\}|(?P<power1>[+-]?[0-9]+)))?)"
)
_DECIMAL = re.compile(rf"(?:[1-9][0-9]{{0,2}}(?:(?:,[0-9]{{3}})+|(?:[{_SPACES}][0-9]{{3}})+)|[0-9]*)(?:\.[0-9]+)?")
_SPOILED_BEFORE = re.compile(r"(?:\^\s?[{(]?|\\sqrt\s?(?:\[[0-9]\])?\{?|√\(?|\}\s?\{)-?\Z")
_SPOILED_AFTER = re.compile(r"\s?(?:\^|\\pi|π|\\sqrt|√|[²³¹⁰⁴-⁹]|\}\s?\{)")
_DECORATION = r"\s*_`~$€£¥₹%{}()\[\]"
_BEFORE = re.compile(rf"(?:[{_DECORATION}=]|\\(?:text|textbf|mathrm|mathbf|boxed|fbox)(?![A-Za-z])|\\[(\[;:$])*")
_AFTER = re.compile(rf"(?:[{_DECORATION}.]|\\[)\];:$%])*")


def last_number(text: str) -> Number | None:
    """The last number in the text, exactly; None where there is none, or the last thing like one is malformed."""
    plain = _plain(text)
    last = None
    for token in _TOKEN.finditer(plain):
        last = token
    return _value(last) if last else None


def whole_number(text: str) -> Number | None:
    """The number that the whole text is, but for markup, currency and percent signs; None where it is anything else."""
    plain = _plain(text)
    token = _TOKEN.search(plain)
    if token is None or not _BEFORE.fullmatch(plain, 0, token.start()) or not _AFTER.fullmatch(plain, token.end()):
        return None
    return _value(token)


def _plain(text: str) -> str:
    if not text.isascii():
        text = text.translate(_READ_AS)
    return text.replace("{,}", ",").replace(r"\,", "\u2009").replace(r"\!", "") if "\\" in text or "{" in text else text


def _value(token: re.Match[str]) -> Number | None:
    text = token.string
    if _SPOILED_BEFORE.search(text, max(0, token.start() - 12), token.start()) or _SPOILED_AFTER.match(
        text, token.end()
    ):
        return None
    size = _size(token)
    if size is None or token["sign"] != "-":
        return size
    # copy_negate and not minus: Decimal's minus rounds to the context's precision
    return size.copy_negate() if isinstance(size, Decimal) else -size


def _size(token: re.Match[str]) -> Number | None:
    """The token's value without its leading sign."""
    if token["mixed"]:
        return _mixed(token["mixed"], *token["part"].split("/"))
    if not token["clump"]:
        return _mixed(token["whole"] or "0", token["top"] or token["top1"], token["bottom"] or token["bottom1"])
    top, slash, bottom = (token["clump"] + (token["spaced"] or "").replace(" ", "")).partition("/")
    if slash:
        return _fraction(top, bottom)
    digits = _decimal_digits(top)
    exponent = token["exponent"] or token["power"] or token["power1"] or "0"
    sign, size = exponent[:1].strip("0123456789"), exponent.lstrip("+-").lstrip("0") or "0"
    return None if digits is None or len(size) > 9 else Decimal(f"{digits}e{sign}{size}")


def _decimal_digits(text: str) -> str | None:
    """The digits without grouping; None where the grouping is not one of thousands."""
    if not _DECIMAL.fullmatch(text):
        return None
    return re.sub(rf"[,{_SPACES}]", "", text)


def _mixed(whole: str, top: str, bottom: str) -> Number | None:
    if len(top) + len(bottom) > MAX_FRACTION_CHARS or Fraction(bottom) == 0:
        return None
    part = Fraction(top) / Fraction(bottom)
    if int(whole) and not 0 <= part < 1:
        return None  # 3 7/2 and 3\frac{-1}{2} are not mixed numbers
    return _reduced(int(whole) + part)


def _fraction(top: str, bottom: str) -> Number | None:
    sign, bottom = ("-", bottom[1:]) if bottom.startswith("-") else ("", bottom)
    above, below = _decimal_digits(top), _decimal_digits(bottom)
    if not above or not below or len(above) + len(below) > MAX_FRACTION_CHARS:
        return None
    divisor = Fraction(sign + below)
    return _reduced(Fraction(above) / divisor) if divisor else None


def _reduced(value: Fraction) -> Number:
    """The Decimal equal to the fraction where there is one (its denominator has no prime factors but 2 and 5)."""
    rest, places = value.denominator, 0
    while rest % 10 == 0:
        rest, places = rest // 10, places + 1
    for factor in (2, 5):
        while rest % factor == 0:
            rest, places = rest // factor, places + 1
    if rest != 1:
        return value
    return Decimal(f"{value.numerator * 10**places // value.denominator}e-{places}")
