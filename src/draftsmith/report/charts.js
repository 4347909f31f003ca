"use strict";
// Draws the figures; colours come from the style sheet by role, so that light and dark are decided in one place.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue("--" + name).trim();

  function coloured(series) {
    const own = colour(series.meta.role);
    const filled = { ...series.marker, color: own };
    return series.type === "bar" ? { ...series, marker: filled } : { ...series, marker: filled, line: { ...series.line, color: own } };
  }

  function themed(layout, narrow) {
    const axis = (given) => ({ ...given, gridcolor: colour("line"), linecolor: colour("line"), tickcolor: colour("line") });
    return {
      ...layout,
      font: { ...layout.font, color: colour("muted"), size: narrow ? 12 : 13 },
      hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), font: { color: colour("ink") } },
      xaxis: axis(layout.xaxis),
      yaxis: axis(layout.yaxis),
    };
  }

  function draw() {
    const narrow = window.matchMedia("(max-width: 760px)").matches;
    for (const [name, figure] of Object.entries(figures)) {
      Plotly.react(name, figure.data.map(coloured), themed(figure.layout, narrow), { displayModeBar: false, responsive: true });
    }
  }

  draw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
