"""The exceptions that cross module borders; each carries one plain sentence.

ValueError stays the type for a person's mistake; the types here exist because the program's end treats them apart.
"""


class UserError(ValueError):
    """A person's mistake: bad config, bad data, too small a machine. Ends the program with exit status 2."""


class RunBroken(RuntimeError):
    """A run that cannot go on: diverged loss, a worker that cannot be replaced. Ends the program with exit status 1."""


class DeadlineExceeded(RunBroken):
    """A wait that outlived its deadline; the sentence names who was waited for, how long, and what to do."""
