// Under each chart, the values at the epoch nearest to the pointer.
for (const chart of document.querySelectorAll("svg[data-stops]")) {
  const stops = JSON.parse(chart.dataset.stops);
  const cursor = chart.querySelector(".cursor");
  const values = chart.parentElement.querySelector(".values");
  const last = values.textContent;
  chart.addEventListener("pointermove", (event) => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
    const nearest = stops.reduce((best, stop) => (Math.abs(stop[0] - x) < Math.abs(best[0] - x) ? stop : best));
    cursor.setAttribute("transform", `translate(${nearest[0]} 0)`);
    cursor.setAttribute("visibility", "visible");
    values.textContent = nearest[1];
  });
  chart.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    values.textContent = last;
  });
}
