// Bundles render.jsx with Grafana's own Apache-2.0 components into one script: node build.mjs NODE_MODULES OUT.js
import path from 'node:path';
import { createRequire } from 'node:module';

const [modules, out] = process.argv.slice(2).map((part) => path.resolve(part));
const esbuild = createRequire(path.join(modules, 'x.js'))('esbuild');

await esbuild.build({
  entryPoints: [path.join(import.meta.dirname, 'render.jsx')],
  bundle: true,
  format: 'iife',
  outfile: out,
  nodePaths: [modules],
  jsx: 'automatic',
  platform: 'browser',
  mainFields: ['browser', 'main', 'module'],
  conditions: ['browser', 'require', 'default'],
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
  loader: { '.svg': 'text', '.woff2': 'dataurl', '.png': 'dataurl', '.ttf': 'dataurl', '.css': 'text' },
  logLevel: 'error',
});
