"""The few shapes that every dashboard is made of: number, time series, table, text, and the board that holds them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

with warnings.catch_warnings():
    # The SDK marks the schema that every Grafana from 10 to 13 reads as superseded as soon as it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, text, timeseries
    from grafana_foundation_sdk.models import common as common_models
    from grafana_foundation_sdk.models import dashboard as models
    from grafana_foundation_sdk.models.prometheus import PromQueryFormat
    from grafana_foundation_sdk.models.text import TextMode

from kvops_dashboards.links import ALERT_LIST_URL, TAG, see

if TYPE_CHECKING:
    from collections.abc import Callable

    from grafana_foundation_sdk.cog.builder import Builder

DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS = 24
# Where an axis ends at least: Grafana draws one of nothing but zeros up to 100, or to 10000 %.
_QUIET_AXIS = {"percentunit": 0.05, "ops": 0.1, "reqps": 0.1, "short": 1.0}
GREEN, YELLOW, RED = "green", "#EAB839", "red"


@dataclass(frozen=True)
class Query:
    """One PromQL expression of a panel and the legend of its series."""

    expr: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """One panel, before it has a place.

    Attributes:
        title: what the panel shows.
        meaning: what it says and what a bad value means; one or two sentences.
        pages: runbook or reference pages that say what to do.
        queries: what it asks Prometheus.
        unit: Grafana's unit id.
        shape: number, series, stacked, table or text.
        width: columns of 24.
        steps: value from which a number turns yellow, and red; None for no colour.
        columns: of a table: label or ``Value #A`` -> heading; columns that are not named are hidden.
        units: of a table: heading -> unit.
        markdown: of a text panel.
        none: what to show where there is no series.
    """

    title: str
    meaning: str
    pages: tuple[str, ...]
    queries: tuple[Query, ...] = ()
    unit: str = "short"
    shape: Literal["number", "series", "stacked", "table", "text"] = "series"
    width: int = 8
    height: int = 8
    steps: tuple[float, float] | None = None
    columns: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    markdown: str = ""
    none: str = "-"
    largest: float | None = None


def number(title: str, meaning: str, pages: tuple[str, ...], expr: str, unit: str, **more: Any) -> Panel:
    """Return a big number with a small graph behind it."""
    settings = {"width": 4, "height": 4} | more
    return Panel(title, meaning, pages, (Query(expr, title),), unit, "number", **settings)


def series(title: str, meaning: str, pages: tuple[str, ...], unit: str, *queries: Query, **more: Any) -> Panel:
    """Return lines over time."""
    return Panel(title, meaning, pages, queries, unit, **more)


def stacked(title: str, meaning: str, pages: tuple[str, ...], unit: str, *queries: Query, **more: Any) -> Panel:
    """Return areas over time that add up."""
    return Panel(title, meaning, pages, queries, unit, "stacked", **more)


@dataclass(frozen=True)
class Row:
    """A heading and the panels under it; the widths of a line of panels add up to 24."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard.

    Attributes:
        uid: the last part of the dashboard's address.
        title: its name in Grafana.
        answers: the question that it answers, one sentence.
        rows: from the most general to the most special.
        anchor: the metric that the variables' values come from.
        text_variable: name of a text field, where the dashboard needs one.
    """

    uid: str
    title: str
    answers: str
    rows: tuple[Row, ...]
    anchor: str = "kvops_connector_info"
    text_variable: str = ""

    @property
    def panels(self) -> list[Panel]:
        """Return all panels in order."""
        return [panel for row in self.rows for panel in row.panels]

    def build(self) -> models.Dashboard:
        """Return the dashboard as the SDK's model.

        Raises:
            ValueError: a line of panels does not fill the 24 columns.
        """
        builder = (
            dashboard.Dashboard(f"kvops / {self.title}")
            .uid(self.uid)
            .description(self.answers)
            .tags([TAG])
            .timezone("browser")
            .time("now-1h", "now")
            .refresh("30s")
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .readonly()
            .links(_links())
            .annotations([_restarts(self.anchor), _firing()])
        )
        for variable in self._variables():
            builder.with_variable(variable)
        y, panel_id = 0, 1
        for row in self.rows:
            builder.with_row(dashboard.Row(row.title).id(panel_id).grid_pos(models.GridPos(h=1, w=COLUMNS, x=0, y=y)))
            y, panel_id = y + 1, panel_id + 1
            for line in _lines(row):
                x = 0
                for panel in line:
                    place = models.GridPos(h=panel.height, w=panel.width, x=x, y=y)
                    builder.with_panel(_grafana_panel(panel).id(panel_id).grid_pos(place))
                    x, panel_id = x + panel.width, panel_id + 1
                y += line[0].height
        return builder.build()

    def _variables(self) -> list[Builder[models.VariableModel]]:
        found = [
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
            _choice("model", "Model", self.anchor, "model_name"),
            _choice("role", "Role", self.anchor, "role"),
            _choice("engine", "Engine", self.anchor, "instance"),
            _choice("router", "Router", "kvops_router_conversations", "instance"),
        ]
        if self.text_variable:
            found.append(dashboard.TextBoxVariable(self.text_variable).label("Request id").default_value(""))
        return found


def _choice(name: str, label: str, metric: str, of: str) -> dashboard.QueryVariable:
    # ".*" rather than the list of values: it also matches series without the label, such as an engine whose scrape
    # configuration sets no role.
    everything = models.VariableOption(text="All", value="$__all", selected=True)
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(f"label_values({metric}, {of})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .current(everything)
    )


def _links() -> list[Builder[models.DashboardLink]]:
    boards = (
        dashboard.DashboardLink("kvops dashboards")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )
    alerts = dashboard.DashboardLink("Alerts").type(models.DashboardLinkType.LINK).url(ALERT_LIST_URL).icon("bolt")
    # Without a placement Grafana shows them above the panels; the SDK would hide them in a menu.
    return [link.placement(None) for link in (boards, alerts)]  # type: ignore[arg-type]


def _restarts(anchor: str) -> Builder[models.AnnotationQuery]:
    ours = f"on(instance) group_left() group by (instance) ({anchor})"
    restarted = f"changes(process_start_time_seconds[$__interval]) * {ours} > 0"
    return _annotation("Restarts", restarted, YELLOW, "{{instance}} restarted")


def _firing() -> Builder[models.AnnotationQuery]:
    return _annotation("Alerts", 'ALERTS{alertname=~"Kvops.*",alertstate="firing"}', RED, "{{alertname}} {{instance}}")


def _annotation(name: str, expr: str, color: str, title: str) -> Builder[models.AnnotationQuery]:
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color(color)
        .target(prometheus.Dataquery().expr(expr).ref_id("Anno").range())
        .title_format(title)
        .placement(None)  # type: ignore[arg-type]
    )


def _lines(row: Row) -> list[list[Panel]]:
    lines: list[list[Panel]] = [[]]
    for panel in row.panels:
        if sum(each.width for each in lines[-1]) == COLUMNS:
            lines.append([])
        lines[-1].append(panel)
        if sum(each.width for each in lines[-1]) > COLUMNS or panel.height != lines[-1][0].height:
            raise ValueError(f"row {row.title!r}: {panel.title!r} does not fit its line")
    if sum(each.width for each in lines[-1]) != COLUMNS:
        raise ValueError(f"row {row.title!r}: its last line does not fill {COLUMNS} columns")
    return lines


def _grafana_panel(panel: Panel) -> Any:
    # The SDK's builders share their methods but no class that declares them.
    shapes: dict[str, Callable[[Panel], Any]] = {
        "number": _number,
        "series": _series,
        "stacked": _series,
        "table": _table,
        "text": _text,
    }
    result = shapes[panel.shape](panel)
    result.title(panel.title).description(f"{panel.meaning}\n\n{see(*panel.pages)}").datasource(DATASOURCE)
    for index, query in enumerate(panel.queries):
        result.with_target(_target(query, chr(ord("A") + index), panel.shape == "table"))
    return result


def _target(query: Query, ref_id: str, as_table: bool) -> prometheus.Dataquery:
    target = prometheus.Dataquery().datasource(DATASOURCE).ref_id(ref_id).expr(query.expr)
    if as_table:
        return target.instant().format(PromQueryFormat.TABLE)
    return target.range().legend_format(query.legend).exemplar(query.exemplars)


def _number(panel: Panel) -> stat.Panel:
    coloured = panel.steps is not None
    return (
        stat.Panel()
        .unit(panel.unit)
        # Prometheus extrapolates, so that one event shows as 1.02.
        .decimals(0 if panel.unit == "short" else 1)
        .no_value(panel.none)
        .mappings([_nothing(panel.none)])
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .thresholds(_thresholds(panel.steps) if coloured else _thresholds(None))
    )


def _nothing(text: str) -> models.SpecialValueMap:
    # Otherwise "no value" takes the lowest threshold's colour, which is red where small is bad.
    result = models.ValueMappingResult(text=text, color="text")
    options = models.DashboardSpecialValueMapOptions(match=models.SpecialValueMatch.NULL_AND_NAN, result=result)
    return models.SpecialValueMap(options=options)


def _thresholds(steps: tuple[float, float] | None) -> dashboard.ThresholdsConfig:
    if steps is None:
        return _absolute([models.Threshold(value=None, color="blue")])
    yellow, red = steps
    if red < yellow:
        # Small is bad: red below ``red``, yellow below ``yellow``.
        bounds = [(None, RED), (red, YELLOW), (yellow, GREEN)]
    else:
        bounds = [(None, GREEN), (yellow, YELLOW), (red, RED)]
    return _absolute([models.Threshold(value=value, color=color) for value, color in bounds])


def _absolute(steps: list[models.Threshold]) -> dashboard.ThresholdsConfig:
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _series(panel: Panel) -> timeseries.Panel:
    result = (
        timeseries.Panel()
        .unit(panel.unit)
        .min(0)
        .line_width(1)
        .fill_opacity(40 if panel.shape == "stacked" else 0)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    if panel.largest is not None:
        result.max(panel.largest)
    elif panel.unit in _QUIET_AXIS:
        result.axis_soft_max(_QUIET_AXIS[panel.unit])
    if panel.shape == "stacked":
        result.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    return result


def _table(panel: Panel) -> table.Panel:
    order = {name: index for index, name in enumerate(panel.columns)}
    result = (
        table.Panel()
        .with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            models.DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": {"Time": True, "Value": True},
                    "indexByName": order,
                    "renameByName": panel.columns,
                },
            )
        )
    )
    for heading, unit in panel.units.items():
        result.override_by_name(heading, [models.DynamicConfigValue(id_val="unit", value=unit)])
    return result


def _text(panel: Panel) -> text.Panel:
    return text.Panel().mode(TextMode.MARKDOWN).content(panel.markdown)
