// The planner's page: looks chosen numbers up in the table that was computed when the site was built. Asks no server.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("planner-data").textContent);
  const form = document.getElementById("planner-form"), names = Object.keys(data.axes);
  const field = name => document.getElementById(`planner-${name}`);
  const place = name => field(name).selectedIndex;
  const price = kind => Math.max(0, Number(field(`price-${kind}`).value) || 0);
  const many = number => number.toLocaleString("en-US");

  // Cells stand in the order of the axes, the last one fastest.
  function cell(places) {
    const at = names.reduce((sum, name) => sum * data.axes[name].length + places[name], 0);
    return Object.fromEntries(data.fields.map((name, number) => [name, data.cells[at][number]]));
  }

  function element(tag, text, ...inside) {
    const made = document.createElement(tag);
    made.textContent = text;
    made.append(...inside);
    return made;
  }

  // The sentences of `dpicl plan`, which a test compares.
  function answer(found, belief) {
    const money = (found.tokens_in * price("in") + found.tokens_out * price("out")) / 1e6;
    const points = `${found.takes} point${found.takes === 1 ? "" : "s"}`;
    const rows = [
      ["Right answers", `${found.right} % (${found.low} to ${found.high}), at most ${found.at_most} % ` +
        `(${found.most_low} to ${found.most_high}) whatever the noise; the noise takes ${points}. This rests on a GUESS about your model: dpicl rehearse FILE measures it, free.`],
      ["Attacker's belief", `${100 * data.priors[place("prior")]} % becomes at most ${belief} %, on average over ` +
        "what is released. Proved, not guessed."],
      ["Calls", `${many(found.private)} private + ${many(found.public)} public, ${many(found.tokens_in)} tokens in, ` +
        `${many(found.tokens_out)} out (60 tokens a record and a question, 1 an answer)`],
      ["Money", price("in") || price("out")
        ? money.toLocaleString("en-US", {minimumFractionDigits: 2, maximumFractionDigits: 2}) : "set the prices above"],
    ];
    if (found.advises) rows.push(["Advice", `Do not spend like this: the noise takes ${points}; ask fewer queries, ` +
      "declare more records, or raise epsilon."]);
    return rows;
  }

  function command() {
    const [epsilon, records, queries, labels] = names.map(name => data.axes[name][place(name)]);
    const prices = ["in", "out"].filter(kind => price(kind)).map(kind => ` --set cost.price_${kind}=${price(kind)}`);
    return `dpicl plan --method voting --epsilon ${epsilon} --delta ${data.delta.toExponential()} --public-size ${records} ` +
      `--max-queries ${queries} --set guess.labels=${labels}${prices.join("")}`;
  }

  function shape(tag, attributes, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    return made;
  }

  // Right answers against epsilon, for the other numbers that are chosen.
  function chart(places) {
    const rows = data.axes.epsilon.map((_, epsilon) => cell({...places, epsilon}));
    const x = number => 44 + number * 300 / (rows.length - 1), y = share => 168 - 1.5 * share;
    const line = part => rows.map((row, number) => `${x(number)},${y(row[part])}`).join(" ");
    const back = rows.map((row, number) => `${x(number)},${y(row.low)}`).reverse().join(" ");
    const now = rows[places.epsilon];
    const drawn = shape("svg", {viewBox: "-12 0 384 230", "font-size": 12, role: "img", "aria-label":
      `Right answers against epsilon: ${rows.map((row, number) => `${row.right} % at ${data.axes.epsilon[number]}`).join(", ")}`});
    for (const share of [0, 50, 100]) drawn.append(
      shape("line", {x1: 44, x2: 344, y1: y(share), y2: y(share), class: "grid"}),
      shape("text", {x: 38, y: y(share) + 4, "text-anchor": "end"}, `${share} %`));
    drawn.append(
      shape("polygon", {points: `${line("high")} ${back}`, class: "range"}),
      shape("polyline", {points: line("at_most"), class: "most"}),
      shape("polyline", {points: line("right"), class: "right"}),
      shape("circle", {cx: x(places.epsilon), cy: y(now.right), r: 6, class: "now"}));
    data.axes.epsilon.forEach((epsilon, number) =>
      drawn.append(shape("text", {x: x(number), y: 188, "text-anchor": "middle"}, epsilon)));
    ["epsilon", "line: right answers; shaded: range; dashed: ceiling"].forEach((said, number) =>
      drawn.append(shape("text", {x: 180, y: 207 + 16 * number, "text-anchor": "middle"}, said)));
    return drawn;
  }

  function show() {
    const places = Object.fromEntries(names.map(name => [name, place(name)]));
    const list = document.createElement("dl");
    for (const [name, text] of answer(cell(places), data.beliefs[place("prior")][places.epsilon]))
      list.append(element("dt", name), element("dd", text));
    list.append(element("dt", "The same in a shell"), element("dd", "", element("code", command())));
    document.getElementById("planner-answer").replaceChildren(list);
    document.getElementById("planner-chart").replaceChildren(chart(places));
  }

  form.addEventListener("input", show);
  // A browser that goes back to the page sets the fields to what was chosen there, without an input event.
  addEventListener("pageshow", show);
  form.addEventListener("submit", event => event.preventDefault());
  form.hidden = document.getElementById("planner-found").hidden = false;
  document.getElementById("planner-tables").open = false;
  show();
})();
