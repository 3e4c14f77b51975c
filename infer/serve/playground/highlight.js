// Colours for Python, made only of elements and text nodes, so that a model's text is never parsed as HTML.

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
const MOST = 200_000; // characters; longer texts are not coloured, which would be slow

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

/** The part of a text from `start` on, coloured in the context of the whole text. */
export function highlighted(text, start, prose) {
  const made = document.createDocumentFragment();
  let done = start;
  for (const [kind, from, to] of text.length > MOST ? [] : pieces(text, prose)) {
    if (to <= start) continue;
    made.append(text.slice(done, Math.max(from, done)));
    const span = document.createElement("span");
    span.className = kind;
    span.textContent = text.slice(Math.max(from, done), to);
    made.append(span);
    done = to;
  }
  made.append(text.slice(done));
  return made;
}
