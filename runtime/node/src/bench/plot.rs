//! The picture of a run: how latencies are distributed, and when which request had which.

use super::client::Answer;
use super::load::{Measured, Record};
use super::report::{Metric, Report};
use plotters::prelude::*;
use std::path::Path;

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    #[error("no request succeeded, so there is nothing to draw")]
    Nothing,
    #[error("cannot draw: {0}")]
    Drawing(String),
    #[error("cannot write {path:?}: {source}")]
    Write { path: std::path::PathBuf, source: std::io::Error },
}

const WIDTH: u32 = 960;
const HEIGHT: u32 = 720;
const LABEL: (&str, u32) = ("sans-serif", 16);
/// Steps of a percentile curve.
const STEPS: u32 = 400;
const COLOURS: [RGBColor; 4] =
    [RGBColor(31, 119, 180), RGBColor(214, 39, 40), RGBColor(44, 160, 44), RGBColor(148, 103, 189)];
/// Least time on the axes, in milliseconds: they are logarithmic.
const LEAST_MS: f64 = 0.01;

/// Draws a run and writes it to a file.
///
/// # Errors
/// Nothing to draw, or a file that cannot be written.
pub fn write_svg(report: &Report, measured: &Measured, path: &Path) -> Result<(), PlotError> {
    let svg = draw(report, measured)?;
    std::fs::write(path, svg).map_err(|source| PlotError::Write { path: path.to_owned(), source })
}

pub fn draw(report: &Report, measured: &Measured) -> Result<String, PlotError> {
    if report.completed == 0 {
        return Err(PlotError::Nothing);
    }
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
        root.fill(&WHITE).map_err(failed)?;
        let (above, below) = root.split_vertically(HEIGHT / 2);
        panel(&above, percentiles(report))?;
        panel(&below, times(measured))?;
        root.present().map_err(failed)?;
    }
    Ok(svg)
}

fn failed(error: impl std::fmt::Display) -> PlotError {
    PlotError::Drawing(error.to_string())
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// What one panel shows.
struct Panel {
    caption: &'static str,
    x: &'static str,
    x_max: f64,
    curves: Vec<Curve>,
}

struct Curve {
    metric: Metric,
    colour: RGBColor,
    /// Across and up, the latter in milliseconds.
    points: Vec<(f64, f64)>,
    /// A line through the points, or the points.
    is_line: bool,
}

/// A curve for each metric: the time that so many percent do not exceed.
fn percentiles(report: &Report) -> Panel {
    let points = |metric: Metric| {
        let at = |step: u32| f64::from(step) * 100.0 / f64::from(STEPS);
        let point = |p: f64| Some((p, report.spread(metric).percentile(p)?.max(LEAST_MS)));
        (0..=STEPS).filter_map(|step| point(at(step))).collect()
    };
    let curve = |(metric, colour)| Curve { metric, colour, points: points(metric), is_line: true };
    let curves = Metric::ALL.into_iter().zip(COLOURS).map(curve).collect();
    Panel { caption: "Latency by percentile", x: "percentile", x_max: 100.0, curves }
}

/// A point for each request: when it was due, and how long it took to its first token and to its end.
fn times(measured: &Measured) -> Panel {
    let points = |metric: Metric| {
        let answered = measured.records.iter().filter_map(|record| Some((record, record.outcome.as_ref().ok()?)));
        let point = |(record, answer): (&Record, &Answer)| {
            let time = if metric == Metric::Ttft { answer.ttft } else { answer.latency };
            (record.due.as_secs_f64(), (time.as_secs_f64() * 1e3).max(LEAST_MS))
        };
        answered.map(point).collect()
    };
    let curve = |metric, colour| Curve { metric, colour, points: points(metric), is_line: false };
    let curves = vec![curve(Metric::Ttft, COLOURS[0]), curve(Metric::E2el, COLOURS[3])];
    let x_max = measured.duration.as_secs_f64().max(f64::MIN_POSITIVE);
    Panel { caption: "Latency by time of request", x: "s", x_max, curves }
}

fn panel(area: &Area<'_>, Panel { caption, x, x_max, curves }: Panel) -> Result<(), PlotError> {
    let (least, most) = bounds(curves.iter().flat_map(|curve| curve.points.iter().map(|(_, ms)| *ms)));
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..x_max, (least..most).log_scale())
        .map_err(failed)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(x).y_desc("ms").label_style(LABEL).max_light_lines(5).draw().map_err(failed)?;
    for Curve { metric, colour, points, is_line } in curves {
        let series = match is_line {
            true => chart.draw_series(LineSeries::new(points, colour.stroke_width(2))),
            false => chart.draw_series(points.into_iter().map(|point| Circle::new(point, 2, colour.filled()))),
        };
        let series = series.map_err(failed)?.label(metric.title());
        series.legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 12, y + 4)], colour.filled()));
    }
    let mut legend = chart.configure_series_labels();
    let legend = legend.position(SeriesLabelPosition::LowerRight).background_style(WHITE.mix(0.8)).label_font(LABEL);
    legend.border_style(BLACK.mix(0.3)).draw().map_err(failed)
}

/// The decades that hold all values.
fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (least, most) = values.fold((f64::MAX, LEAST_MS), |(least, most), ms| (least.min(ms), most.max(ms)));
    let least = 10f64.powf(least.min(most).log10().floor());
    let most = 10f64.powf(most.log10().ceil());
    (least, if most > least { most } else { least * 10.0 })
}
