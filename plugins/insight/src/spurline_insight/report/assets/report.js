// Draw every figure of the page with the colours of the current theme, and again when the theme changes.
(() => {
  const settings = { responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] };

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Plotly has no setting for the opacity of areas, so their colours include it, as #rrggbbaa.
  const color = (name) => (name.endsWith("-faint") ? `${variable(name.slice(0, -6))}2b` : variable(name));

  // A colour such as "--series-1" stands for the CSS variable of that name, "--series-1-faint" for a light shade of it.
  const resolved = (value, name = "") => {
    if (typeof value === "string") return name.endsWith("color") && value.startsWith("--") ? color(value) : value;
    if (Array.isArray(value)) return value.map((item) => resolved(item, name));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item, key)]));
    }
    return value;
  };

  const merged = (base, changes) => {
    const isMapping = (value) => value && typeof value === "object" && !Array.isArray(value);
    if (!isMapping(base) || !isMapping(changes)) return changes === undefined ? base : changes;
    const result = { ...base };
    for (const [key, value] of Object.entries(changes)) result[key] = merged(base[key], value);
    return result;
  };

  const axis = () => ({
    gridcolor: color("--grid"),
    linecolor: color("--border"),
    zeroline: false,
    automargin: true,
    title: { font: { size: 12, color: color("--muted") }, standoff: 10 },
    tickfont: { size: 11.5, color: color("--muted") },
  });

  const theme = () => ({
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--text") },
    margin: { l: 52, r: 12, t: 30, b: 40 },
    legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", font: { size: 12 } },
    showlegend: true,
    hoverlabel: {
      bgcolor: color("--surface"), bordercolor: color("--border"), font: { color: color("--text"), size: 12 },
      // By default plotly shortens names, and may cut an escaped character such as &amp; in two.
      namelength: -1,
    },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--muted"), activecolor: color("--accent") },
    xaxis: axis(),
    yaxis: axis(),
  });

  const loadPlotly = async () => {
    const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), (sign) => sign.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
    // By default plotly.js offers to upload the data of a chart to a server. Turn this off for figures of plugins too.
    Plotly.setPlotConfig({ showSendToCloud: false, plotlyServerURL: "", displaylogo: false });
  };

  const draw = () => document.querySelectorAll("script.figure").forEach((source) => {
    // A figure inside a closed <details> has no width yet. It is drawn when the <details> is opened.
    if (source.closest("details:not([open])")) return;
    const { data, layout } = JSON.parse(source.textContent);
    Plotly.react(source.previousElementSibling, resolved(data), merged(theme(), resolved(layout)), settings);
  });

  loadPlotly().then(() => {
    draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", () => part.open && draw());
    document.documentElement.dataset.drawn = "yes";
  }).catch((error) => {
    const problem = document.createElement("p");
    problem.className = "notice";
    problem.textContent = `This browser cannot draw the plots: ${error.message}`;
    document.querySelector("main").prepend(problem);
  });
})();
