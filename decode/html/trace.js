// The trace viewer: steps through the rounds of report.json or watch.json. Step 0 is the prompt's own token; then each
// round has three steps (drafted, checked, kept); then plain decoding goes on alone until it has said as much.
(() => {
  const data = JSON.parse(document.getElementById("trace-data").textContent);
  const method = JSON.parse(document.getElementById("method-data").textContent);
  const box = document.querySelector(".trace"), $ = (name) => box.querySelector("." + name);
  const SVG = "http://www.w3.org/2000/svg", WIDE = 116, HIGH = 36, COLUMN = 152, ROW = 46, TOP = 34, LEFT = 12;
  let trace, at = 0, timer = null;

  const make = (parent, name, attributes = {}, text = null) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    parent.append(element);
    return element;
  };
  const shown = (id) => data.words[id].replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll(" ", "·") || "∅";
  const short = (id) => { const all = [...shown(id)]; return all.length > 11 ? all.slice(0, 10).join("") + "…" : all.join(""); };
  const share = (p) => p === null ? "–" : p >= 0.995 && p < 1 ? ">99%" : p > 0 && p < 0.005 ? "<1%" : `${Math.round(p * 100)}%`;
  const many = (n, what, plural = what + "s") => `${n} ${n === 1 ? what : plural}`;
  const round = () => at && Math.min(Math.ceil(at / 3), trace.rounds.length);
  const phase = () => at === 0 ? -1 : at > 3 * trace.rounds.length ? 2 : (at - 1) % 3;
  const plainPasses = () => { // the twin takes its pass while the target takes its own
    const after = Math.max(0, at - 3 * trace.rounds.length);
    return Math.min(trace.plain.length - 1, Math.max(0, round() - (phase() === 0 ? 1 : 0)) + after);
  };
  const last = () => 3 * trace.rounds.length + Math.max(0, trace.plain.length - 1 - trace.rounds.length);

  function layout(one) {
    const depth = [0], children = one.tokens.map(() => []), y = [];
    for (let i = 1; i < one.tokens.length; i++) { depth[i] = depth[one.parents[i]] + 1; children[one.parents[i]].push(i); }
    const end = one.path[one.path.length - 1], own = one.own !== null;
    let row = 0;
    const place = (node) => {
      // the path that is kept runs straight on: it comes first
      const inOrder = children[node].slice().sort((a, b) => one.path.includes(b) - one.path.includes(a) || a - b);
      if (node === end && own) { y[-1] = row; if (!inOrder.length) { y[node] = row++; return; } row++; }
      if (!inOrder.length) { y[node] = row++; return; }
      inOrder.forEach(place);
      y[node] = node === end && own ? y[-1] : y[inOrder[0]];
    };
    place(0);
    return { depth, y, rows: row, columns: Math.max(...depth, own ? depth[end] + 1 : 0) };
  }

  function outcome(one, node, when) {
    if (node === 0) return "root";
    if (when < 2) return "asked";
    return one.path.includes(node) ? "kept" : "refused";
  }

  function draw() {
    const stage = $("stage");
    stage.replaceChildren();
    if (at === 0) { const p = document.createElement("p"); p.style.padding = "0 1rem"; p.textContent = "The prompt has been read; its own pass gave the first token. That pass is no round."; stage.append(p); return; }
    const one = trace.rounds[round() - 1], when = phase(), plan = layout(one);
    const x = (depth) => LEFT + depth * COLUMN, y = (row) => TOP + row * ROW + HIGH / 2;
    const wide = x(plan.columns) + WIDE + LEFT, high = TOP + plan.rows * ROW + 8;
    const svg = make(stage, "svg", { width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": said() });
    // who drafts each column, and what it goes by
    make(svg, "text", { x: x(0), y: 15, class: "head" }, method.trunk ? "target, last token" : "last token");
    for (let depth = 1; depth <= Math.max(...plan.depth); depth++) {
      make(svg, "text", { x: x(depth), y: 15, class: "head" }, method.part.replace("{}", depth));
      const from = method.chained ? depth - 1 : 0; // each head reads the trunk, or each depth what the one before hands on
      if (method.trunk || method.chained) make(svg, "path", { class: "wire", d: `M${x(from) + 30},20 C${x(from) + 60},29 ${x(depth) - 20},29 ${x(depth) + 20},20` });
    }
    if (when === 1) make(svg, "rect", { class: "pass", x: 4, y: TOP - 5, width: x(Math.max(...plan.depth)) + WIDE + 4, height: plan.rows * ROW + 4, rx: 8 });
    const edge = (a, b, kind) => make(svg, "path", { class: `edge ${kind}`, d: `M${a[0] + WIDE},${a[1]} C${a[0] + WIDE + 20},${a[1]} ${b[0] - 20},${b[1]} ${b[0]},${b[1]}` });
    const where = (node) => [x(plan.depth[node]), y(plan.y[node])];
    const order = one.tokens.map((_, i) => i).sort((a, b) => one.path.includes(a) - one.path.includes(b)); // kept ones on top
    for (const node of order) if (node) edge(where(one.parents[node]), where(node), outcome(one, node, when));
    const end = one.path[one.path.length - 1], own = [x(plan.depth[end] + 1), y(plan.y[-1])];
    if (when === 2 && one.own !== null) edge(where(end), own, "own");
    one.tokens.forEach((token, node) => drawn(svg, where(node), outcome(one, node, when), token, node === 0 ? "the target's" :
      when === 0 ? `drafter ${share(one.draft[node])}` : `${share(one.draft[node])}, target ${share(one.target[node])}`, node));
    if (when === 2 && one.own !== null) drawn(svg, own, "own", one.new[one.new.length - 1], `${one.corrected ? "correction" : "bonus"} ${share(one.own)}`, "own");
  }

  function drawn(svg, [x, y], kind, token, small, node) {
    const group = make(svg, "g", { class: `node ${kind}`, "data-token": token, "data-node": node }), top = y - HIGH / 2;
    if (kind === "own") make(group, "polygon", { class: "shape", points: [[0, 18], [9, 0], [107, 0], [116, 18], [107, 36], [9, 36]].map(([a, b]) => `${x + a},${top + b}`).join(" ") });
    else make(group, "rect", { class: "shape", x, y: top, width: WIDE, height: HIGH, rx: kind === "kept" ? 18 : kind === "asked" ? 5 : 0 });
    const mark = { kept: "✓ ", refused: "✕ ", own: "+ " }[kind] || "";
    const line = make(group, "text", { x: x + WIDE / 2, y: top + 16, "text-anchor": "middle" });
    const piece = (text, name) => { const span = make(line, "tspan", name ? { class: name } : {}, text); return span; };
    piece(mark); piece(short(token), "token");
    make(group, "text", { x: x + WIDE / 2, y: top + 29, "text-anchor": "middle", class: "small" }, small);
    make(group, "title", {}, `${shown(token)} (id ${token})`);
  }

  function said() {
    const rounds = trace.rounds.length;
    if (at === 0) return `“${shown(trace.start)}” came from the prompt's own pass, with and without a drafter.`;
    if (at > 3 * rounds) {
      const left = trace.plain.length - 1 - plainPasses();
      return `Done after ${many(rounds, "pass", "passes")}. ` + (left > 0 ? `Plain decoding still needs ${many(left, "pass", "passes")}.` : `Plain decoding took ${many(trace.plain.length - 1, "pass", "passes")}.`);
    }
    const one = trace.rounds[round() - 1], drafts = one.tokens.length - 1 + (one.left_out || 0), kept = one.path.length - 1;
    const words = one.path.slice(1).map((node) => `“${shown(one.tokens[node])}”`).join(" ");
    const head = `Pass ${round()} of ${rounds}: `;
    if (phase() === 0) return head + (drafts ? `after “${shown(one.tokens[0])}” the drafter proposes ${many(drafts, "token")}.` : "nothing is drafted here.") + (one.left_out ? ` The ${many(one.left_out, "least likely one", "least likely ones")} are not drawn.` : "");
    if (phase() === 1) return head + `the target looks at ${drafts ? `all ${drafts + 1} nodes` : "the last token"} in one pass.`;
    const own = one.own === null ? " The text ends here." : one.corrected ? ` Then the target writes “${shown(one.new[one.new.length - 1])}” itself, which was not among the drafts.` : ` The target adds “${shown(one.new[one.new.length - 1])}” as a bonus.`;
    return head + (kept ? `${kept} of the drafts kept: ${words}.` : "no draft kept.") + own + ` ${many(one.new.length, "token")} from one pass.`;
  }

  function text(into, tokens, pieces, kinds, fresh) {
    into.replaceChildren();
    tokens.forEach((token, i) => {
      const span = document.createElement("span");
      span.textContent = pieces[i]; span.dataset.token = token; span.className = kinds[i] + (i >= fresh ? " last" : "");
      into.append(span);
    });
    into.scrollTop = into.scrollHeight;
  }

  function show() {
    const played = phase() === 2 ? round() : round() - 1, tokens = [trace.start], kinds = ["own"];
    let before = 1;
    trace.rounds.slice(0, Math.max(0, played)).forEach((one) => { before = tokens.length; one.new.forEach((token, i) => { tokens.push(token); kinds.push(i < one.path.length - 1 ? "kept" : "own"); }); });
    if (phase() !== 2 || at > 3 * trace.rounds.length) before = tokens.length;
    text($("drafted-text"), tokens, trace.pieces, kinds, before);
    const plain = trace.plain.slice(0, plainPasses() + 1);
    text($("plain-text"), plain, trace.plain_pieces, plain.map(() => "plain"), phase() === 0 || at === 0 ? plain.length : plain.length - 1);
    const passes = Math.max(0, played);
    $("drafted-count").textContent = `${many(passes, "pass", "passes")}, ${many(tokens.length, "token")}`;
    const saved = tokens.length - 1 - passes;
    $("plain-count").textContent = `${many(plainPasses(), "pass", "passes")}, ${many(plain.length, "token")}` + (saved > 0 ? `; ${many(saved, "pass", "passes")} saved so far` : "");
    box.querySelectorAll(".phases li").forEach((item, i) => i === phase() && at <= 3 * trace.rounds.length ? item.setAttribute("aria-current", "step") : item.removeAttribute("aria-current"));
    draw();
    $("said").textContent = said();
    $("at").value = at; $("at").setAttribute("aria-valuetext", `step ${at} of ${last()}, pass ${round()}`);
    $("back").disabled = $("first").disabled = at === 0; $("step").disabled = at === last();
    const rows = $("nodes").tBodies[0];
    rows.replaceChildren();
    if (at) trace.rounds[round() - 1].tokens.forEach((token, node) => {
      const one = trace.rounds[round() - 1], row = rows.insertRow();
      const cells = [node, shown(token), token, node ? one.parents[node] : "–", share(one.draft[node]), share(one.target[node]), { root: "already chosen", asked: "drafted", kept: "kept", refused: "refused" }[outcome(one, node, phase())]];
      cells.forEach((value, i) => { const cell = row.insertCell(); cell.textContent = value; if (i === 1 || i === 6) cell.className = "text"; });
    });
  }

  const go = (to) => { at = Math.max(0, Math.min(last(), to)); show(); };
  const stop = () => { clearInterval(timer); timer = null; $("play").textContent = "Play"; };
  const play = () => {
    if (timer) return stop();
    if (at === last()) go(0);
    $("play").textContent = "Pause";
    timer = setInterval(() => { go(at + 1); if (at === last()) stop(); }, Number($("speed").value));
  };
  const choose = (index) => { stop(); trace = data.prompts[index]; $("asked").textContent = trace.prompt; $("at").max = last(); go(0); };

  $("first").addEventListener("click", () => { stop(); go(0); });
  $("back").addEventListener("click", () => { stop(); go(at - 1); });
  $("step").addEventListener("click", () => { stop(); go(at + 1); });
  $("play").addEventListener("click", play);
  $("speed").addEventListener("change", () => { if (timer) { stop(); play(); } });
  $("at").addEventListener("input", (event) => { stop(); go(Number(event.target.value)); });
  $("which").addEventListener("change", (event) => choose(Number(event.target.value)));
  box.addEventListener("keydown", (event) => {
    if (event.target.tagName !== "BUTTON") return; // elsewhere the arrows scroll
    if (event.key === "ArrowRight") { stop(); go(at + 1); event.preventDefault(); }
    if (event.key === "ArrowLeft") { stop(); go(at - 1); event.preventDefault(); }
  });
  choose(0);
})();
