// Markdown to nodes that run and load nothing. HTML and images in it are shown as they were written.

const { marked, DOMPurify } = globalThis;
const asText = text => text.replace(/[&<>"]/g, c => `&#${c.charCodeAt(0)};`);

marked.use({
  gfm: true,
  breaks: true,
  tokenizer: { html() {}, tag() {} },
  renderer: {
    image: ({ raw }) => asText(raw),
    checkbox: ({ checked }) => checked ? "☑ " : "☐ ",
  },
});
const KEPT = {
  ALLOWED_TAGS: ("p br hr h1 h2 h3 h4 h5 h6 ul ol li strong em del code pre blockquote a "
    + "table thead tbody tr th td #text").split(" "),
  ALLOWED_ATTR: ["href", "title", "align", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"], // which the pattern below is not about
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
DOMPurify.addHook("afterSanitizeAttributes", node => {
  if (node.nodeName === "A") Object.assign(node, { target: "_blank", rel: "noopener noreferrer" });
});

export const rendered = text => DOMPurify.sanitize(marked.parse(text), KEPT);
