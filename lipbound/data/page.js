const body = document.querySelector("#layers tbody");
function select(row) {
  body.querySelectorAll("tr").forEach(r => r.setAttribute("aria-selected", r === row));
  const detail = document.getElementById("detail");
  detail.replaceChildren(document.getElementById("layer-" + row.dataset.index).content.cloneNode(true));
}
body.addEventListener("click", e => { const row = e.target.closest("tr"); if (row) select(row); });
body.addEventListener("keydown", e => {
  const row = e.target.closest("tr");
  if (e.key === "Enter" || e.key === " ") { e.preventDefault(); select(row); }
  const next = {ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling}[e.key];
  if (next) { e.preventDefault(); next.focus(); select(next); }
});
document.querySelectorAll("#layers th button").forEach(button => button.addEventListener("click", () => {
  const head = button.parentElement, column = [...head.parentElement.children].indexOf(head);
  const down = head.getAttribute("aria-sort") === (button.dataset.kind === "number" ? "descending" : "ascending");
  const order = (button.dataset.kind === "number") !== down ? "descending" : "ascending";
  document.querySelectorAll("#layers th[aria-sort]").forEach(th => th.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", order);
  const key = row => { const cell = row.children[column];
    return button.dataset.kind === "text" ? cell.textContent : parseFloat(cell.dataset.value); };
  const sign = order === "ascending" ? 1 : -1;
  const rows = [...body.children].sort((a, b) => { const x = key(a), y = key(b);
    return sign * (typeof x === "string" ? x.localeCompare(y, undefined, {numeric: true}) : x - y); });
  body.append(...rows);
}));
const first = [...body.children].sort((a, b) => b.children[4].dataset.value - a.children[4].dataset.value)
  .find(r => document.getElementById("layer-" + r.dataset.index).content.querySelector("img")) || body.children[0];
if (first) select(first);
