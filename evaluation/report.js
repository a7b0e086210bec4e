"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("screen and (prefers-color-scheme: dark)");

  // Colours stand in the figures as names of CSS variables; plotly wants their values.
  function themed(value, key, style) {
    if (Array.isArray(value)) return value.map((item) => themed(item, "", style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, themed(inner, name, style)]));
    }
    const isColor = /color$/i.test(key) && typeof value === "string" && value.startsWith("--");
    return isColor ? style.getPropertyValue(value).trim() : value;
  }

  function template(style) {
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--line"),
      automargin: true, title: { standoff: 8, font: { color: color("--muted"), size: 12 } } };
    return { layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 12, color: color("--ink") },
      margin: { l: 56, r: 12, t: 8, b: 40 }, xaxis: axis, yaxis: axis,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      hoverlabel: { align: "left", bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } } } };
  }

  function draw(width) {
    const style = getComputedStyle(document.documentElement);
    for (const figure of figures) {
      const layout = Object.assign({}, themed(figure.layout, "", style), { template: template(style) });
      const space = document.getElementById("plot-" + figure.name);
      if (width) Object.assign(layout, { autosize: false, width: figure.wide ? width : width / 2 - 36, height: space.clientHeight });
      Plotly.react(space, themed(figure.data, "", style), layout, { responsive: !width, displayModeBar: false });
    }
  }

  draw(0);
  dark.addEventListener("change", () => draw(0));
  window.addEventListener("beforeprint", () => draw(640));
  window.addEventListener("afterprint", () => draw(0));
})();
