// Draws the charts in the colours of the theme, and again when the theme changes.
(() => {
  const themed = (value, style) => {
    if (typeof value === "string") return (value.startsWith("--") && style.getPropertyValue(value).trim()) || value;
    if (Array.isArray(value)) return value.map((one) => themed(one, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, themed(one, style)]));
  };
  const config = { responsive: true, displayModeBar: false };
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    for (const chart of document.querySelectorAll(".chart")) {
      const { data, layout } = themed(JSON.parse(chart.nextElementSibling.textContent), style);
      // On a touch screen a finger on a chart moves the page.
      if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false;
      Plotly.react(chart, data, layout, config);
    }
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
