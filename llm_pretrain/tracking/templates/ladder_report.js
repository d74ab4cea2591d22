// Draws the charts of a ladder's report from the data in the page.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  // The traces of plotly for one of the page: a band is two.
  function traces(one, theme) {
    const color = one.color === null ? theme.text : theme.series[one.color % theme.series.length];
    const base = { type: "scatter", x: one.x, name: escaped(one.name), showlegend: one.legend !== false };
    if (one.kind === "band") {
      const edge = { ...base, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      return [
        { ...edge, y: one.low },
        { ...edge, y: one.high, fill: "tonexty", fillcolor: theme.quiet + "33" },
      ];
    }
    const marked = { best: "markers", "line+points": "lines+markers" };
    return [{
      ...base, y: one.y, mode: marked[one.kind] || "lines", text: one.text.map(escaped),
      hovertemplate: "%{y:.4f}, %{text}<extra></extra>",
      line: { color, width: 2, dash: one.kind === "dashed" ? "dash" : "solid" },
      marker: { color, size: one.kind === "best" ? 10 : 7, symbol: one.kind === "best" ? "diamond-open" : "circle" },
    }];
  }

  const draw = drawer(["charts"], async (part, theme) => {
    for (const chart of data.charts) {
      const plan = layout(theme, chart);
      const drawn = chart.traces.flatMap((one) => traces(one, theme));
      plan.hovermode = "closest";
      plan.legend.traceorder = "normal"; // with a filled trace plotly would reverse it
      plan.xaxis = { ...plan.xaxis, type: "log", exponentformat: chart.exponents, title: { ...plan.xaxis.title, text: chart.horizontal } };
      placeLegend(chart.id, plan, drawn, 60); // the labels of a logarithmic axis take two rows
      await Plotly.react(chart.id, drawn, plan, PLOTLY_OPTIONS);
    }
  });
  draw("charts");
})();
