"use strict";
// Charts: one range of seconds for all of them; on a touch screen a finger scrolls the page, and buttons zoom.
const rangeOf = (chart) => chart.layout.xaxis.range.map(Number);
const charts = [];
let isFollowing = false;
function showRange(start, end) {
  isFollowing = true;
  Promise.all(charts.map((chart) => Plotly.relayout(chart, { "xaxis.range": [start, end] }))).then(() => {
    isFollowing = false;
  });
}
async function unpackLibrary() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
}
async function drawCharts() {
  if (typeof DecompressionStream === "undefined") {
    for (const told of document.querySelectorAll("[data-chart]")) {
      document.getElementById(told.dataset.chart).textContent = "Charts need a browser of 2023 or later.";
    }
    return;
  }
  await unpackLibrary();
  for (const told of document.querySelectorAll("[data-chart]")) {
    const { data, layout, config } = JSON.parse(told.textContent);
    charts.push(await Plotly.newPlot(told.dataset.chart, data, layout, config));
  }
  for (const chart of charts) {
    chart.on("plotly_relayout", (change) => {
      if (!isFollowing && Object.keys(change).some((key) => key.startsWith("xaxis"))) showRange(...rangeOf(chart));
    });
    if (matchMedia("(pointer: coarse)").matches) await Plotly.relayout(chart, { dragmode: false });
  }
  for (const button of document.querySelectorAll("#ranges button")) {
    button.addEventListener("click", () => {
      if (button.dataset.zoom === undefined) return showRange(Number(button.dataset.start), Number(button.dataset.end));
      const [start, end] = rangeOf(charts[0]);
      const middle = (start + end) / 2;
      const half = ((end - start) / 2) * Number(button.dataset.zoom);
      showRange(middle - half, middle + half);
    });
  }
}
window.drawn = drawCharts();

// The table of values: rows that have all words searched for, sorted by a column, some at a time.
const table = document.getElementById("values");
const rows = [...table.tBodies[0].rows];
const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
const search = document.getElementById("search");
const more = document.getElementById("more");
const STRIDE = 25;
let numShown = STRIDE;
function showRows() {
  const words = search.value.toLowerCase().split(/\s+/);
  const found = [...table.tBodies[0].rows].filter((row) => words.every((word) => texts.get(row).includes(word)));
  const shown = new Set(found.slice(0, numShown));
  for (const row of rows) row.hidden = !shown.has(row);
  more.hidden = found.length <= numShown;
  document.getElementById("found").textContent = `${shown.size} of ${found.length} shown.`;
}
function sortBy(column) {
  const header = table.tHead.rows[0].cells[column];
  const isDown = header.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", isDown ? "descending" : "ascending");
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  const keyed = rows.map((row) => ({ row, cell: row.cells[column] }));
  keyed.sort((a, b) => {
    const [x, y] = [a.cell.dataset.key, b.cell.dataset.key];
    const order = x === undefined ? compare(a.cell.textContent, b.cell.textContent) : Number(x) - Number(y);
    return isDown ? -order : order;
  });
  table.tBodies[0].append(...keyed.map((each) => each.row));
  showRows();
}
[...table.tHead.rows[0].cells].forEach((header, column) => {
  header.querySelector("button").addEventListener("click", () => sortBy(column));
});
search.addEventListener("input", () => {
  numShown = STRIDE;
  showRows();
});
more.addEventListener("click", () => {
  numShown += 20 * STRIDE;
  showRows();
});
showRows();
