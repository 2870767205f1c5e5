//! How the time of a call grows with ranks and with the batch, as a picture.

use std::fmt::Write;
use std::time::Instant;

/// A curve: its name, its colour, its points (x, µs).
pub struct Curve {
    pub name: &'static str,
    pub colour: &'static str,
    pub points: Vec<(u32, f64)>,
}

const REPETITIONS: usize = 25;

/// Median of a call's time in µs; `before` is not timed.
#[expect(clippy::disallowed_methods, reason = "the core is told the time; its bench has to take it")]
pub fn median_us<S>(mut before: impl FnMut() -> S, mut run: impl FnMut(&mut S)) -> f64 {
    let mut times: Vec<f64> = (0..REPETITIONS)
        .map(|_| {
            let mut state = before();
            let start = Instant::now();
            run(&mut state);
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    times[REPETITIONS / 2]
}

const WIDTH: f64 = 340.0;
const HEIGHT: f64 = 220.0;
const MARGIN: f64 = 60.0;
/// Both axes are logarithmic; the time runs from 1 µs to 100 ms.
const DECADES: u32 = 5;

/// Panels side by side: the label of the x axis and the curves over it.
pub fn svg(panels: &[(&str, Vec<Curve>)]) -> String {
    let panel = WIDTH + 2.0 * MARGIN;
    let (width, height) = (panel * panels.len() as f64, HEIGHT + 2.0 * MARGIN);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (at, (label, curves)) in panels.iter().enumerate() {
        let _ = writeln!(out, "<g transform=\"translate({},{MARGIN})\">", panel * at as f64 + MARGIN);
        draw(&mut out, label, curves);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

fn draw(out: &mut String, label: &str, curves: &[Curve]) {
    let xs = || curves.iter().flat_map(|curve| curve.points.iter().map(|(x, _)| f64::from(*x)));
    let (least, most) = xs().fold((f64::MAX, 0.0f64), |(least, most), x| (least.min(x), most.max(x)));
    let x_of = |x: f64| WIDTH * (x / least).ln() / (most / least).ln();
    let y_of = |us: f64| HEIGHT * (1.0 - us.max(1.0).log10() / f64::from(DECADES));
    for decade in 0..=DECADES {
        let (us, y) = (10u32.pow(decade), y_of(10f64.powi(decade as i32)));
        let _ = writeln!(out, "<path d=\"M0 {y:.1}H{WIDTH}\" stroke=\"#ddd\"/>");
        let _ = writeln!(out, "<text x=\"-6\" y=\"{:.1}\" text-anchor=\"end\">{us} µs</text>", y + 4.0);
    }
    for (x, _) in curves.first().map_or(&[][..], |curve| &curve.points) {
        let at = x_of(f64::from(*x));
        let _ = writeln!(out, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{x}</text>", HEIGHT + 18.0);
    }
    let _ = writeln!(out, "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", WIDTH / 2.0, HEIGHT + 38.0);
    for (at, Curve { name, colour, points }) in curves.iter().enumerate() {
        let path: Vec<String> =
            points.iter().map(|(x, us)| format!("{:.1} {:.1}", x_of(f64::from(*x)), y_of(*us))).collect();
        let _ = writeln!(out, "<path d=\"M{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>", path.join("L"));
        let x = WIDTH * at as f64 / curves.len() as f64;
        let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"-12\" fill=\"{colour}\">{name}</text>");
    }
}
