// What the page does beyond standing there: arrow keys in the tables of layers, and charts drawn from the tables of times.
// Whatever comes from the archive is set as text, never as HTML.
"use strict";
(() => {
  const LINES_SHOWN = 8;

  function explainCells(table) {
    const line = document.getElementById(table.dataset.says);
    const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].slice(1));
    let current = rows[0][0];
    for (const cell of rows.flat()) cell.tabIndex = cell === current ? 0 : -1;
    const choose = (cell) => {
      current.tabIndex = -1;
      current = cell;
      cell.tabIndex = 0;
      line.textContent = cell.dataset.says;
    };
    table.addEventListener("focusin", (event) => event.target.dataset.says && choose(event.target));
    table.addEventListener("mouseover", (event) => {
      if (event.target.tagName === "TD") line.textContent = event.target.dataset.says;
    });
    table.addEventListener("click", (event) => event.target.tagName === "TD" && event.target.focus());
    table.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      const y = rows.findIndex((row) => row.includes(current));
      const x = rows[y].indexOf(current);
      const to = { Home: rows[y][0], End: rows[y].at(-1) }[event.key] ?? (step && rows[y + step[0]]?.[x + step[1]]);
      if (!to) return;
      event.preventDefault();
      to.focus();
    });
  }

  function linesOf(table) {
    const lines = new Map();
    for (const row of table.tBodies[0].rows) {
      if (row.dataset.over === "") continue;
      if (!lines.has(row.dataset.layer)) lines.set(row.dataset.layer, new Map());
      lines.get(row.dataset.layer).set(Number(row.dataset.m), Number(row.dataset.over));
    }
    return lines;
  }

  function draw(chart) {
    const lines = linesOf(document.getElementById(chart.dataset.times));
    chart.replaceChildren();
    if (!lines.size) {
      chart.textContent = "The rates of this kind of GPU are not known, so there is no floor to compare with.";
      return null;
    }
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const ms = [...new Set([...lines.values()].flatMap((line) => [...line.keys()]))].sort((a, b) => a - b);
    const axis = { stroke: colour("--ink"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
    const series = [...lines.keys()].map((name, i) => ({
      label: name,
      stroke: colour(`--c${i % 8}`),
      width: 2,
      dash: i < 8 ? [] : [6, 3],
      spanGaps: true,
      show: i < LINES_SHOWN,
      points: { show: true, size: 5 },
      value: (_, value) => (value == null ? "-" : value.toFixed(2)),
    }));
    const plot = new uPlot(
      {
        width: chart.clientWidth,
        height: 320,
        scales: { x: { time: false, distr: 3, log: 2 }, y: { range: (_, least, most) => [Math.min(0.8, least * 0.95), Math.max(1.5, most * 1.05)] } },
        axes: [
          { ...axis, label: "M", values: (_, ticks) => ticks },
          { ...axis, label: "time / floor", values: (_, ticks) => ticks.map((tick) => tick.toFixed(2)) },
        ],
        series: [{ label: "M" }, ...series],
        cursor: { drag: { x: false, y: false } },
      },
      [ms, ...[...lines.values()].map((line) => ms.map((m) => line.get(m) ?? null))],
      chart,
    );
    for (const name of [...chart.querySelectorAll(".u-legend .u-series th")].slice(1)) {
      name.tabIndex = 0;
      name.setAttribute("role", "button");
      const tell = () => name.setAttribute("aria-pressed", String(!name.parentElement.classList.contains("u-off")));
      tell();
      name.addEventListener("click", tell);
      name.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        name.click();
      });
    }
    return plot;
  }

  function follow(chart) {
    let plot = draw(chart);
    let at = -1;
    const again = () => {
      plot?.destroy();
      plot = draw(chart);
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    addEventListener("resize", () => plot?.setSize({ width: chart.clientWidth, height: 320 }));
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!plot || !step) return;
      event.preventDefault();
      at = Math.min(Math.max(at + step, 0), plot.data[0].length - 1);
      plot.setCursor({ left: plot.valToPos(plot.data[0][at], "x"), top: 20 });
    });
  }

  document.querySelectorAll("table.heat").forEach(explainCells);
  document.querySelectorAll(".chart").forEach(follow);
})();
