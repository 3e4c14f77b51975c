// Colours Python code with elements and text nodes only, so that a model's text is never parsed as HTML.

const KEYWORDS =
  "and|as|assert|async|await|break|case|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|match|" +
  "nonlocal|not|or|pass|raise|return|try|while|with|yield|None|True|False|self|cls";
const PYTHON = new RegExp(
  [
    String.raw`(?<comment>#[^\n]*)`,
    String.raw`(?<string>\b[rbfuRBFU]{1,2}(?=["'])(?:${strings()})|${strings()})`,
    String.raw`(?<name>(?<=\b(?:def|class)[ \t]+)\w+|@\w[\w.]*)`,
    String.raw`(?<keyword>\b(?:${KEYWORDS})\b)`,
    String.raw`(?<number>\b\d[\w.]*)`,
  ].join("|"),
  "g",
);
const FENCE = /```[^\n]*\n([\s\S]*?)(?:```|$)/dg;
const MOST = 200_000; // characters; colouring a longer text would be slow, so it is not coloured

function strings() {
  return String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
}

/** Pieces [kind, start, end] of code, or of the code between ``` in prose. */
function* pieces(text, prose) {
  const ranges = prose ? Array.from(text.matchAll(FENCE), (match) => match.indices[1]) : [[0, text.length]];
  for (const [from, to] of ranges) {
    for (const match of text.slice(from, to).matchAll(PYTHON)) {
      const kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
      yield [kind, from + match.index, from + match.index + match[0].length];
    }
  }
}

/** Stretches [start, end, names] of a text as elements with the classes `names`, coloured in the context of the whole text. */
export function highlighted(text, stretches, prose) {
  const made = document.createDocumentFragment();
  const colours = text.length > MOST ? [] : [...pieces(text, prose)];
  let at = 0;
  for (const [start, end, names] of stretches) {
    const into = names ? made.appendChild(element(names)) : made;
    let done = start;
    while (at < colours.length && colours[at][2] <= start) at++;
    for (let i = at; i < colours.length && colours[i][1] < end; i++) {
      const [kind, ...range] = colours[i];
      const [from, to] = [Math.max(range[0], start), Math.min(range[1], end)];
      into.append(text.slice(done, from));
      into.append(element(kind, text.slice(from, to)));
      done = to;
    }
    into.append(text.slice(done, end));
  }
  return made;
}

export function element(className, text = "") {
  const span = document.createElement("span");
  span.className = className;
  span.textContent = text;
  return span;
}
