// Draws the report's charts from the data in the page: curves over steps, tokens or time, and expert maps.
// Labels come from the run's files, so all of them are escaped before plotly interprets its markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const controls = document.getElementById("controls");
  const several = data.runs.length > 1;
  const AXES = { step: "optimizer step", tokens: "loss tokens", hours: "hours of training" };
  const DASHES = ["solid", "dot", "dash", "dashdot", "longdash"];
  const EVEN = [[0, "#2c5aa0"], [0.5, "#f3f1ec"], [1, "#c2410c"]];
  const EVEN_DARK = [[0, "#5b9bff"], [0.5, "#232a35"], [1, "#ff8a3d"]];

  const faint = (color) => color + "40";

  function options() {
    const form = new FormData(controls);
    return { axis: form.get("axis") || "step", log: form.has("log"), smoothing: Number(form.get("smoothing") || 0) };
  }

  // Exponential moving average with Adam's bias correction; gaps stay gaps. Rounded, because plotly cannot draw
  // an axis over the rounding errors of a constant.
  function smoothed(values, weight) {
    let mean = 0, share = 1;
    return values.map((value) => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      share *= weight;
      return Number((mean / (1 - share)).toPrecision(7));
    });
  }

  function curve(chart, one, index, theme, now) {
    const run = data.runs[one.run];
    const table = run[one.table];
    const isEvaluation = one.table === "evaluation";
    const raw = table[one.key].map((value) => (value === null ? null : value * chart.scale));
    const own = isEvaluation && chart.id === "loss-chart" && !several ? 1 : index;
    const isPredicted = one.key.startsWith("eval/predicted_"), isEdge = isPredicted && !one.key.endsWith("_loss");
    const color = isPredicted && !several ? theme.quiet : theme.series[(several ? one.run : own) % theme.series.length];
    const kinds = [...new Set(chart.curves.map((each) => each.key))];
    const dash = several ? DASHES[kinds.indexOf(one.key) % DASHES.length] : isPredicted ? "dash" : "solid";
    const label = several ? (kinds.length > 1 ? `${run.name} · ${one.label}` : run.name) : one.label;
    const few = table.step.length < 60;
    const base = {
      x: table[now.axis], type: "scatter", mode: (isEvaluation && !isEdge) || raw.length === 1 ? "lines+markers" : "lines",
      name: escaped(shortened(label, isNarrow() ? 34 : 60)), connectgaps: isEvaluation,
      line: { color, dash, width: isEdge ? 0 : few ? 2 : 1.6 }, marker: { color, size: 6 },
      fill: one.key === "eval/predicted_high" ? "tonexty" : "none", fillcolor: faint(color), // down to predicted_low
      showlegend: chart.curves.length > 1 && one.label !== "",
    };
    if (isEvaluation || !chart.smooth || now.smoothing === 0) return [{ ...base, y: raw }];
    const behind = { ...base, y: raw, line: { color: faint(color), width: 1 }, showlegend: false, hoverinfo: "skip" };
    return [behind, { ...base, y: smoothed(raw, now.smoothing) }];
  }

  function restartsAndSkips(chart, theme, now) {
    const traces = [], shapes = [], annotations = [];
    data.runs.forEach((run, index) => {
      const color = several ? theme.series[index % theme.series.length] : theme.quiet;
      run.restarts.slice(-40).forEach((mark) => {
        if (mark[now.axis] === null) return;
        shapes.push({ type: "line", x0: mark[now.axis], x1: mark[now.axis], y0: 0, y1: 1, yref: "paper", line: { color, width: 1.2, dash: "dash" } });
        if (chart.id === "loss-chart" && run.restarts.length <= 6 && !several) {
          annotations.push({ x: mark[now.axis], y: 1, yref: "paper", yanchor: "top", xanchor: "left", xshift: 3, showarrow: false, text: "resumed by " + escaped(mark.label), font: { color: theme.quiet, size: 11.5 } });
        }
      });
      if (chart.skipped && run.skipped.length) {
        const values = run.skipped.map((mark) => (chart.id === "loss-chart" ? mark.value : null));
        const heights = values.every((value) => value === null) ? null : values;
        traces.push({
          type: "scatter", mode: "markers", x: run.skipped.map((mark) => mark[now.axis]), y: heights || run.skipped.map(() => 0.02),
          yaxis: heights ? "y" : "y2", name: several ? escaped(shortened(run.name, 30)) + " · skipped" : "skipped step", showlegend: true,
          text: run.skipped.map((mark) => escaped(mark.label)), hovertemplate: "skipped: %{text}<extra></extra>",
          marker: { symbol: "x", size: 8, color: theme.mark },
        });
      }
    });
    return { traces, shapes, annotations };
  }

  // plotly's own range of a constant is one below to one above it, whatever its magnitude.
  function rangeOfConstant(traces, chart) {
    const values = [...new Set(traces.flatMap((trace) => trace.y).filter((value) => value !== null).concat(chart.lines.map((line) => line.value)))];
    if (values.length !== 1) return undefined;
    return values[0] ? [Math.min(0, 2 * values[0]), Math.max(0, 2 * values[0])] : [-0.05, 1];
  }

  function drawChart(chart, theme, now) {
    const plan = layout(theme, chart);
    const extra = restartsAndSkips(chart, theme, now);
    const traces = chart.curves.flatMap((one, index) => curve(chart, one, index, theme, now)).concat(extra.traces);
    plan.xaxis.title.text = AXES[now.axis];
    plan.yaxis.type = (chart.log && traces.some((trace) => trace.y.some((value) => value > 0))) || (now.log && chart.id.includes("loss")) ? "log" : "linear";
    if (plan.yaxis.type === "linear") plan.yaxis.range = rangeOfConstant(traces, chart);
    plan.yaxis2 = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
    plan.shapes = extra.shapes;
    plan.annotations = extra.annotations;
    chart.lines.forEach((line, index) => {
      plan.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: line.value, y1: line.value, line: { color: theme.quiet, width: 1.2, dash: "dot" } });
      plan.annotations.push({ xref: "paper", x: 1, xanchor: "right", y: plan.yaxis.type === "log" ? Math.log10(line.value) : line.value, yanchor: "bottom", showarrow: false, text: escaped(line.label), font: { color: theme.quiet, size: 11.5 } });
    });
    placeLegend(chart.id, plan, traces);
    return Plotly.react(chart.id, traces, plan, PLOTLY_OPTIONS);
  }

  function drawMap(id, theme, map) {
    const plan = layout(theme, { unit: map.vertical });
    plan.hovermode = "closest";
    plan.xaxis.title.text = map.horizontal;
    plan.xaxis.showgrid = plan.yaxis.showgrid = false;
    plan.yaxis.autorange = "reversed";
    for (const axis of [plan.xaxis, plan.yaxis]) axis.zeroline = false;
    if (map.y.length <= 16) { plan.yaxis.tickmode = "array"; plan.yaxis.tickvals = map.y; }
    if (map.x.length <= 16 && map.horizontal === "expert") { plan.xaxis.tickmode = "array"; plan.xaxis.tickvals = map.x; }
    const above = map.scale === "above";
    const spread = Math.max(0.05, map.z.flat().reduce((most, value) => Math.max(most, Math.abs(value - 1)), 0));
    const reach = Math.min(spread, map.reach);
    const trace = {
      type: "heatmap", x: map.x, y: map.y, z: map.z, colorscale: (isDark() ? EVEN_DARK : EVEN).slice(above ? 1 : 0).map(([at, color]) => [above ? 2 * at - 1 : at, color]),
      zmin: above ? 1 : 1 - reach, zmax: 1 + reach,
      colorbar: { thickness: 10, outlinewidth: 0, tickfont: { color: theme.text }, title: { text: "load", font: { color: theme.quiet } } },
      hovertemplate: map.hover + "<br>load %{z:.2f}<extra></extra>", hoverongaps: false,
    };
    return Plotly.react(id, [trace], plan, PLOTLY_OPTIONS);
  }

  const picks = document.getElementById("expert-picks");
  const units = (rows) => rows.map((row) => row.map((value) => value / 100));

  function chosenRun() {
    const pick = picks.querySelector("select[name=run]");
    return data.experts[pick ? Number(pick.value) : 0];
  }

  function listLayers() {
    const pick = picks.querySelector("select[name=layer]");
    pick.replaceChildren(...chosenRun().layers.map((layer, index) => new Option(String(layer), String(index))));
  }

  async function drawExperts(theme) {
    if (!picks) return;
    const run = chosenRun();
    const layer = Number(picks.querySelector("select[name=layer]").value);
    const experts = Array.from({ length: run.experts }, (_, index) => index);
    document.querySelector("#expert-load-title .layer").textContent = run.layers[layer];
    document.querySelector("#expert-last-title .last-step").textContent = run.last_step.toLocaleString("en");
    await drawMap("expert-load", theme, { x: run.steps, y: experts, z: units(run.load[layer]), horizontal: AXES.step, vertical: "expert", reach: 1, hover: "step %{x}, expert %{y}" });
    await drawMap("expert-peaks", theme, { x: run.steps, y: run.layers, z: units(run.peak), horizontal: AXES.step, vertical: "layer", reach: 3, scale: "above", hover: "step %{x}, layer %{y}" });
    await drawMap("expert-last", theme, { x: experts, y: run.layers, z: units(run.last), horizontal: "expert", vertical: "layer", reach: 1, hover: "layer %{y}, expert %{x}" });
  }

  const draw = drawer(["curves", "experts"], async (part, theme) => {
    if (part === "experts") await drawExperts(theme);
    else for (const chart of data.charts) await drawChart(chart, theme, options());
  });

  function disableMissingAxes() {
    for (const input of controls.querySelectorAll("input[name=axis]")) {
      const tables = data.runs.flatMap((run) => [run.train, run.evaluation]).filter((table) => table.step);
      input.disabled = !tables.every((table) => table[input.value].some((value) => value !== null));
    }
  }

  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.addEventListener("input", () => {
    controls.querySelector("output").textContent = options().smoothing;
    draw("curves");
  });
  if (picks) {
    listLayers();
    picks.addEventListener("input", (event) => {
      if (event.target.name === "run") listLayers();
      draw("experts");
    });
  }
  disableMissingAxes();
  draw("curves", "experts");
})();
