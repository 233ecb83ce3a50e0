"use strict";
// Draws every figure of the page from the JSON beside it. A narrow window gets a little more room for the curves.
const NARROW = 600;

function layoutFor(element, layout) {
  if (element.clientWidth >= NARROW) return layout;
  const font = { ...layout.font, size: 10 };
  return { ...layout, font, margin: { ...layout.margin, l: Math.min(layout.margin.l, 44), r: 8 } };
}

for (const element of document.querySelectorAll("[data-figure]")) {
  const figure = JSON.parse(document.getElementById(element.dataset.figure).textContent);
  const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
  Plotly.newPlot(element, figure.data, layoutFor(element, figure.layout), options);
}

function resizeAll() {
  for (const element of document.querySelectorAll("[data-figure]")) Plotly.Plots.resize(element);
}
window.addEventListener("beforeprint", resizeAll);
window.addEventListener("afterprint", resizeAll);
