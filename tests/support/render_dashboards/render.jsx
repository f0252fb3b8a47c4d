// Draws one dashboard JSON with live data: Grafana's own components and field rules, without Grafana.
import {
  applyFieldOverrides,
  createTheme,
  FieldType,
  formattedValueToString,
  getFieldDisplayValues,
  standardFieldConfigEditorRegistry,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
} from '@grafana/data';
import {
  BigValue,
  PanelChrome,
  ThemeContext,
  TimeSeries,
} from '@grafana/ui';
import inter from '@fontsource/inter/files/inter-latin-400-normal.woff2';
import interMedium from '@fontsource/inter/files/inter-latin-500-normal.woff2';
import uplotStyle from 'uplot/dist/uPlot.min.css';
import { createRoot } from 'react-dom/client';
import { firstValueFrom } from 'rxjs';

const WIDTH = 1440;
const CELL = WIDTH / 24;
const ROW = 38;
const theme = createTheme({ colors: { mode: 'dark' } });
const { board, prometheus, start, end } = window.RENDER;
const step = Math.max(1, Math.round((end - start) / 300));
const rateWindow = window.RENDER.rateWindow;

// The field options that the dashboards set; Grafana registers them with their editors, which are not needed here.
const OPTIONS = ['unit', 'min', 'max', 'color', 'thresholds', 'mappings', 'noValue', 'decimals'];
standardFieldConfigEditorRegistry.setInit(() =>
  OPTIONS.map((id) => ({ id, path: id, name: id, process: (value) => value, shouldApply: () => true }))
);
standardTransformersRegistry.setInit(() =>
  [standardTransformers.mergeTransformer, standardTransformers.organizeFieldsTransformer].map((transformation) => ({
    id: transformation.id,
    name: transformation.name,
    transformation: async () => transformation,
  }))
);

function fillIn(expr) {
  return expr
    .replaceAll('$__rate_interval', rateWindow)
    .replaceAll('$__range', `${end - start}s`)
    .replaceAll('$__interval', `${step}s`)
    .replace(/\$(model|role|engine|router)\b/g, '.*');
}

async function ask(target) {
  const instant = target.instant;
  const form = new URLSearchParams({ query: fillIn(target.expr) });
  if (instant) {
    form.set('time', end);
  } else {
    Object.entries({ start, end, step }).forEach(([key, value]) => form.set(key, value));
  }
  const answer = await fetch(`${prometheus}/api/v1/query${instant ? '' : '_range'}`, { method: 'POST', body: form });
  const body = await answer.json();
  if (body.status !== 'success') {
    throw new Error(body.error);
  }
  return instant ? tableFrame(target, body.data.result) : body.data.result.map((series) => seriesFrame(target, series));
}

function seriesFrame(target, { metric, values }) {
  const name = (target.legendFormat || '').replace(/{{(\w+)}}/g, (_, label) => metric[label] ?? '');
  const known = new Map(values.map(([time, value]) => [Math.round(time), Number(value)]));
  const times = [];
  for (let time = start; time <= end; time += step) {
    times.push(time);
  }
  const numbers = times.map((time) => known.get(Math.round(time)) ?? null).map((n) => (Number.isFinite(n) ? n : null));
  return {
    refId: target.refId,
    name,
    length: times.length,
    fields: [
      { name: 'Time', type: FieldType.time, config: { interval: step * 1000 }, values: times.map((time) => time * 1000) },
      { name: 'Value', type: FieldType.number, config: { displayNameFromDS: name }, labels: metric, values: numbers },
    ],
  };
}

function tableFrame(target, result) {
  const labels = [...new Set(result.flatMap(({ metric }) => Object.keys(metric)))].filter((name) => name !== '__name__');
  const column = (name, type, values) => ({ name, type, config: {}, values });
  return [
    {
      refId: target.refId,
      length: result.length,
      fields: [
        column('Time', FieldType.time, result.map(() => end * 1000)),
        ...labels.map((label) => column(label, FieldType.string, result.map(({ metric }) => metric[label] ?? ''))),
        column(window.manyTargets ? `Value #${target.refId}` : 'Value', FieldType.number, result.map(({ value }) => Number(value[1]))),
      ],
    },
  ];
}

async function framesOf(panel) {
  window.manyTargets = panel.targets.length > 1;
  let frames = [];
  for (const target of panel.targets) {
    frames.push(...(await ask(target)));
  }
  if (panel.transformations?.length) {
    frames = await firstValueFrom(transformDataFrame(panel.transformations, frames));
  }
  return applyFieldOverrides({
    data: frames,
    fieldConfig: panel.fieldConfig ?? { defaults: {}, overrides: [] },
    replaceVariables: (text) => text,
    theme,
    fieldConfigRegistry: undefined,
  });
}

const custom = (frames, panel) => {
  const defaults = panel.fieldConfig?.defaults?.custom ?? {};
  frames.forEach((frame) => frame.fields.forEach((field) => (field.config.custom = { ...defaults, ...field.config.custom })));
  return frames;
};

// Grafana's own table needs more of Grafana around it than this page has.
function Cells({ frame }) {
  const cell = { textAlign: 'left', padding: '4px 8px', fontSize: 13, whiteSpace: 'nowrap' };
  const shown = (field, row) => (field.display ? formattedValueToString(field.display(field.values[row])) : field.values[row]);
  return (
    <table>
      <thead>
        <tr>{frame.fields.map((field) => <th key={field.name} style={cell}>{field.config.displayName ?? field.name}</th>)}</tr>
      </thead>
      <tbody>
        {Array.from({ length: frame.length }, (_, row) => (
          <tr key={row}>{frame.fields.map((field) => <td key={field.name} style={cell}>{shown(field, row)}</td>)}</tr>
        ))}
      </tbody>
    </table>
  );
}

function Body({ panel, frames, width, height }) {
  if (panel.type === 'text') {
    return <div style={{ padding: 8, whiteSpace: 'pre-wrap', fontSize: 13, overflow: 'hidden' }}>{panel.options.content}</div>;
  }
  if (panel.type === 'stat') {
    const shown = getFieldDisplayValues({
      data: frames,
      fieldConfig: panel.fieldConfig,
      reduceOptions: panel.options.reduceOptions,
      replaceVariables: (text) => text,
      theme,
      sparkline: true,
    })[0];
    return <BigValue value={shown.display} sparkline={shown.sparkline} width={width} height={height} theme={theme}
      colorMode={panel.options.colorMode} graphMode={panel.options.graphMode} textMode="value" justifyMode="auto" />;
  }
  if (panel.type === 'table' && frames[0]?.length) {
    return <Cells frame={frames[0]} />;
  }
  const points = frames.some((frame) => frame.fields.some((f) => f.type === FieldType.number && f.values.some((v) => v !== null)));
  if (!points) {
    return <div data-empty style={{ padding: 20, color: '#f66' }}>no data</div>;
  }
  return <TimeSeries frames={custom(frames, panel)} timeRange={{ from: { valueOf: () => start * 1000 }, to: { valueOf: () => end * 1000 } }}
    timeZone="utc" width={width} height={height} legend={panel.options.legend} options={panel.options} />;
}

function Drawn({ panel, frames, error, top }) {
  const { x, w, h } = panel.gridPos;
  const place = { position: 'absolute', left: x * CELL + 4, top, width: w * CELL - 8, height: h * ROW - 8 };
  if (panel.type === 'row') {
    return <div style={{ ...place, fontSize: 16, paddingTop: 6, fontWeight: 500 }}>{panel.title}</div>;
  }
  return (
    <div style={place} data-panel={panel.title}>
      <PanelChrome title={panel.title} width={place.width} height={place.height}>
        {(width, height) =>
          error ? <div data-error>{error}</div> : <Body panel={panel} frames={frames} width={width} height={height} />
        }
      </PanelChrome>
    </div>
  );
}

// Grafana measures the labels of axes in this font; in another one they are cut off.
async function loadFonts() {
  const faces = [['400', inter], ['500', interMedium]].map(([weight, url]) => new FontFace('Inter', `url(${url})`, { weight }));
  (await Promise.all(faces.map((face) => face.load()))).forEach((face) => document.fonts.add(face));
}

async function main() {
  await loadFonts();
  const drawn = [];
  for (const panel of board.panels) {
    try {
      drawn.push({ panel, frames: panel.targets ? await framesOf(panel) : [] });
    } catch (error) {
      drawn.push({ panel, error: String(error) });
    }
  }
  const bottom = Math.max(...board.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  document.body.style.cssText = `margin:0;background:${theme.colors.background.canvas};color:${theme.colors.text.primary};font-family:Inter,Helvetica,Arial,sans-serif;font-size:14px`;
  const style = document.createElement('style');
  style.textContent = `${uplotStyle} * { box-sizing: border-box } button { all: unset; color: inherit; font: inherit }`;
  document.head.append(style);
  const root = document.getElementById('root');
  root.style.cssText = `position:relative;width:${WIDTH}px;height:${bottom * ROW + 40}px`;
  createRoot(root).render(
    <ThemeContext.Provider value={theme}>
      <h1 style={{ margin: 0, padding: '8px 8px', fontSize: 18 }}>{board.title}</h1>
      {drawn.map((each) => <Drawn key={each.panel.id} {...each} top={40 + each.panel.gridPos.y * ROW} />)}
    </ThemeContext.Provider>
  );
  await new Promise((done) => setTimeout(done, 1500));
  document.title = 'drawn';
}

main().catch((error) => {
  document.body.innerText = error.stack;
});
