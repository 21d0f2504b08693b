import { defineConfig } from "vite";

// One script and one style sheet under fixed names: the server and the report name them, and a build is reproducible.
export default defineConfig({
  base: "./",
  publicDir: false,
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    rollupOptions: {
      output: { entryFileNames: "page.js", assetFileNames: "page[extname]", codeSplitting: false },
    },
  },
});
