// What the pages' charts share: theme, layout, legend, and the order of drawing.
"use strict";
const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const shortened = (text, length) => (text.length > length ? text.slice(0, length - 1) + "…" : text);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => window.matchMedia("(prefers-color-scheme: dark)").matches;
const isNarrow = () => window.innerWidth < 600;

function readTheme() {
  return {
    text: css("--text"), quiet: css("--quiet"), grid: css("--grid"), line: css("--line"),
    panel: css("--panel"), mark: css("--mark"), series: css("--series").split(","),
  };
}

function layout(theme, chart) {
  const axis = { gridcolor: theme.grid, linecolor: theme.line, zerolinecolor: theme.grid, tickcolor: theme.line, automargin: true, separatethousands: true };
  return {
    autosize: true, margin: { l: 52, r: 14, t: 12, b: 44 }, hovermode: "x unified",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: theme.text },
    hoverlabel: { bgcolor: theme.panel, bordercolor: theme.line, font: { color: theme.text } },
    legend: { orientation: "h", x: 0, yanchor: "top", font: { color: theme.text }, itemwidth: 30 },
    xaxis: { ...axis, automargin: false, title: { text: "", standoff: 6, font: { color: theme.quiet } }, nticks: isNarrow() ? 5 : 10 },
    yaxis: { ...axis, title: { text: chart.unit, standoff: 8, font: { color: theme.quiet } }, exponentformat: "power" },
  };
}

const PLOTLY_OPTIONS = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

// Number of rows of a legend, estimated from the widths of its entries.
function legendRows(id, names) {
  const room = document.getElementById(id).clientWidth - 80;
  const widest = names.reduce((most, name) => Math.max(most, 52 + 7 * name.length), 0);
  return names.length ? Math.ceil(names.length / Math.max(1, Math.floor(room / widest))) : 0;
}

// Makes room below a chart for the legend of its traces, `below` pixels under the horizontal axis.
function placeLegend(id, plan, traces, below = 46) {
  const names = traces.filter((trace) => trace.showlegend).map((trace) => trace.name);
  plan.margin.b = below + 20 * legendRows(id, names);
  const height = document.getElementById(id).clientHeight - plan.margin.t - plan.margin.b;
  plan.legend.y = -below / Math.max(60, height);
}

// A function that draws the named parts of the page, and again when its colours or its width change. One drawing
// at a time: two overlapping calls of plotly leave a chart incomplete.
function drawer(parts, drawPart) {
  const wanted = new Set();
  let drawing = false;
  async function draw(...some) {
    some.forEach((part) => wanted.add(part));
    if (drawing) return;
    drawing = true;
    document.documentElement.dataset.drawn = "false";
    while (wanted.size) {
      const [part] = wanted;
      wanted.delete(part);
      await drawPart(part, readTheme());
    }
    drawing = false;
    document.documentElement.dataset.drawn = "true";
  }
  for (const query of ["(prefers-color-scheme: dark)", "(max-width: 599px)"]) {
    window.matchMedia(query).addEventListener("change", () => draw(...parts));
  }
  return draw;
}
