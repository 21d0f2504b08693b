// LaTeX of docstrings (JSON on standard input) -> MathML, so that the page needs no typesetter.
// usage: python ... | node formulas.mjs OUT.json
import { readFileSync, writeFileSync } from "node:fs";
import temml from "temml";

const records = JSON.parse(readFileSync(0, "utf8"));
for (const [name, record] of Object.entries(records)) {
  const mathml = temml.renderToString(record.latex, { displayMode: true, throwOnError: true, annotate: false });
  // The content-security policy of the page allows no style attribute.
  record.mathml = mathml.replace(/ style="[^"]*"/g, "").replace(/ class="[^"]*"/g, "");
  if (record.mathml.includes("<script")) throw new Error(name);
}
writeFileSync(process.argv[2], `${JSON.stringify(records)}\n`);
console.log(`${Object.keys(records).length} formulas`);
