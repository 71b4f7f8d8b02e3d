// Draws the charts of a report with plotly.js: when they come into view, and again if the colour
// scheme, a choice or the legend changes, or the page is printed.
"use strict";
(() => {
  const PRINTED = 680; // pixels: fits A4 and Letter with the margins of style.css
  const ON_DARK = { "#000000": "#ffffff", "#222222": "#e4e4e4", "#d9d9d9": "#454545" };

  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const chosen = {}; // number of the quantity that a chart shows
  const hidden = new Set(); // variants that the legend has switched off
  const drawn = new Set();
  let printing = false;

  function coloured(figure) {
    const turn = (key, value) => (key.endsWith("color") && ON_DARK[value]) || value;
    return JSON.parse(JSON.stringify(figure), dark.matches && !printing ? turn : undefined);
  }

  // Put the points of curves, which are by step, on the x-axis that is chosen.
  function place(figure, axis) {
    figure.layout.xaxis.title.text = figure.layout.xaxis.uirevision = axis.title;
    figure.data.forEach((trace, i) => {
      trace.x = axis.x ? axis.x[i] : trace.x.map((step) => step * axis.scales[i]);
      if (!trace.x.length) trace.visible = false;
      const named = axis.title === "step" ? "step %{x:,}" : `%{x:,.4s} ${axis.title}`;
      trace.hovertemplate = trace.hovertemplate.replace("step %{x:,}", named);
    });
  }

  function draw(id) {
    const figure = coloured({ data: charts[id].data, layout: charts[id].layout });
    for (const trace of figure.data) {
      if (hidden.has(trace.legendgroup)) trace.visible = false;
      if (charts[id].choices) trace.z = charts[id].choices[chosen[id] || 0];
    }
    if (charts[id].over) place(figure, charts[id].over[chosen[id] || 0]);
    if (printing) figure.layout.width = PRINTED;
    if (touch || printing) figure.layout.margin.t = 8; // room for the buttons only if there are any
    if (touch) {
      // A finger scrolls the page; it would otherwise draw a rectangle to zoom into.
      figure.layout.dragmode = false;
      figure.layout.xaxis.fixedrange = figure.layout.yaxis.fixedrange = true;
    }
    drawn.add(id);
    Plotly.react(id, figure.data, figure.layout, {
      responsive: true,
      displaylogo: false,
      // Named one by one: plotly.js 4 has a button of its own that sends a chart to a server.
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
      displayModeBar: touch || printing ? false : "hover",
    });
  }

  const redraw = () => drawn.forEach(draw);

  const observer = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        observer.unobserve(target);
        draw(target.id);
      }
    },
    { rootMargin: "300px" },
  );
  for (const id of Object.keys(charts)) observer.observe(document.getElementById(id));

  dark.addEventListener("change", redraw);

  for (const button of document.querySelectorAll("button[data-group]")) {
    button.addEventListener("click", () => {
      const group = button.dataset.group;
      if (!hidden.delete(group)) hidden.add(group);
      button.setAttribute("aria-pressed", String(!hidden.has(group)));
      draw("losses");
    });
  }

  for (const select of document.querySelectorAll("select[data-chart]")) {
    select.selectedIndex = 0; // some browsers keep the choice when a page is loaded again
    select.addEventListener("change", () => {
      chosen[select.dataset.chart] = select.selectedIndex;
      draw(select.dataset.chart);
    });
  }

  // On paper nothing can be opened or scrolled to.
  let closed = [];
  addEventListener("beforeprint", () => {
    printing = true;
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const details of closed) details.open = true;
    Object.keys(charts).forEach(draw);
  });
  addEventListener("afterprint", () => {
    printing = false;
    for (const details of closed) details.open = false;
    redraw();
  });
})();
