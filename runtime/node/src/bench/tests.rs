use super::client::Usage;
use super::plot::draw;
use super::*;
use serde_json::{Map, json};
use std::sync::Arc;
use std::time::Duration;

const RANDOM: Random = Random { input_tokens: 20, output_tokens: 10, range: 0.0, prefix_tokens: 0, prefixes: 1 };

fn workload(random: Random) -> Workload {
    Workload { prompts: Prompts::Random(random), conversations: 50, turns: 3, seed: 7 }
}

fn word_count(text: &str) -> usize {
    text.split(' ').count()
}

#[test]
fn prompts_follow_from_the_seed_in_whatever_order_they_are_asked_for() {
    let one = workload(Random { range: 0.5, ..RANDOM });
    let forward: Vec<_> = (0..50).map(|index| one.conversation(index)).collect();
    let mut backward: Vec<_> = (0..50).rev().map(|index| one.clone().conversation(index)).collect();
    backward.reverse();
    assert_eq!(forward, backward);
    assert_ne!(forward[0], Workload { seed: 8, ..one.clone() }.conversation(0));
    let mut texts: Vec<_> = forward.iter().flatten().map(|turn| &turn.text).collect();
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), 150, "no text comes twice");
    // The same on every machine and in every version, or figures of the past cannot be repeated.
    assert_eq!(one.conversation(0)[0].text.split(' ').take(4).collect::<Vec<_>>(), FIRST_WORDS);
}

const FIRST_WORDS: [&str; 4] = ["which", "there", "even", "than"];

#[test]
fn lengths_are_within_their_range_and_reach_its_ends() {
    let all = |random| -> Vec<Turn> { (0..50).flat_map(|index| workload(random).conversation(index)).collect() };
    assert!(all(RANDOM).iter().all(|turn| word_count(&turn.text) == 20 && turn.output_tokens == 10));
    let turns = all(Random { range: 0.2, ..RANDOM });
    let (inputs, outputs): (Vec<_>, Vec<_>) = turns.iter().map(|t| (word_count(&t.text), t.output_tokens)).unzip();
    assert_eq!((inputs.iter().min(), inputs.iter().max()), (Some(&16), Some(&24)));
    assert_eq!((outputs.iter().min(), outputs.iter().max()), (Some(&8), Some(&12)));
    let shortest = all(Random { input_tokens: 1, output_tokens: 1, range: 0.99, ..RANDOM });
    assert!(shortest.iter().all(|turn| (1..=2).contains(&word_count(&turn.text)) && turn.output_tokens >= 1));
}

#[test]
fn conversations_share_as_many_prefixes_as_they_are_told() {
    let shared = workload(Random { prefix_tokens: 5, prefixes: 3, ..RANDOM });
    let plain = workload(RANDOM);
    let first = |index: u32| shared.conversation(index)[0].text.clone();
    let prefix = |index: u32| first(index).split(' ').take(5).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!((prefix(0), prefix(1)), (prefix(3), prefix(4)));
    assert!(prefix(0) != prefix(1) && prefix(1) != prefix(2) && prefix(0) != prefix(2));
    // Only the first turn has it, and what follows is what there would be without.
    assert!(first(4).ends_with(&format!(" {}", plain.conversation(4)[0].text)));
    assert_eq!(shared.conversation(4)[1..], plain.conversation(4)[1..]);
}

fn due(rate: Option<f64>, burstiness: f64, seed: u64) -> Vec<Duration> {
    Pace { rate, burstiness, concurrency_max: None }.due(seed).take(4001).collect()
}

#[test]
fn arrivals_follow_from_the_seed_and_keep_to_the_rate() {
    assert_eq!(due(Some(5.0), 1.0, 3), due(Some(5.0), 1.0, 3));
    assert_ne!(due(Some(5.0), 1.0, 3), due(Some(5.0), 1.0, 4));
    for burstiness in [0.5, 1.0, 4.0] {
        let due = due(Some(5.0), burstiness, 3);
        assert_eq!(due[0], Duration::ZERO);
        let gaps: Vec<f64> = due.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((mean - 0.2).abs() < 0.02, "burstiness {burstiness}: mean {mean}");
        // The variance of a gamma distribution is the square of its mean over its shape.
        let wanted = mean * mean / burstiness;
        assert!((variance / wanted - 1.0).abs() < 0.2, "burstiness {burstiness}: variance {variance} of {wanted}");
    }
    assert!(due(None, 1.0, 3).iter().all(Duration::is_zero));
    // A rate that asks for nothing gives no time that cannot be.
    assert!(due(Some(f64::MIN_POSITIVE), 1.0, 3)[1] >= Duration::from_secs(1_000_000));
}

#[test]
fn a_file_of_conversations_is_read_in_both_forms() {
    let file = json!([
        { "id": "a", "conversations": [
            { "from": "human", "value": "one" }, { "from": "gpt", "value": "x".repeat(40) },
            { "from": "human", "value": "two" }, { "from": "gpt", "value": "" },
            { "from": "human", "value": "without an answer" },
        ] },
        { "messages": [{ "role": "user", "content": "three" }, { "role": "assistant", "content": "ok" }] },
        { "conversations": [{ "from": "gpt", "value": "begins with the model" }, { "from": "human", "value": "no" }] },
        { "conversations": [] },
    ])
    .to_string();
    let turn = |text: &str, output_tokens| Turn { text: text.into(), output_tokens };
    let read = |output| conversations_from_json(file.as_bytes(), output).unwrap();
    assert_eq!(read(None), [vec![turn("one", 10), turn("two", 1)], vec![turn("three", 1)]]);
    assert_eq!(read(Some(5))[0], [turn("one", 5), turn("two", 5)]);
    let texts = Prompts::Texts(Arc::new(read(None)));
    let of_file = Workload { prompts: texts, conversations: 5, turns: 1, seed: 1 };
    let sent: Vec<String> = (0..5).map(|index| of_file.conversation(index)[0].text.clone()).collect();
    for pass in sent.chunks_exact(2) {
        let mut pass = pass.to_vec();
        pass.sort();
        assert_eq!(pass, ["one", "three"], "each comes once before any comes again");
    }
    assert_eq!(of_file.requests(), 5);
    assert_eq!(Workload { conversations: 2, turns: 9, ..of_file }.requests(), 3);

    let wrong = |text: &str| conversations_from_json(text.as_bytes(), None).unwrap_err().to_string();
    assert_eq!(wrong("[]"), "no conversation in it begins with what a user says");
    assert!(wrong("[").starts_with("not a list of conversations: EOF"));
    assert!(wrong("[{\"text\": 1}]").contains("missing field `conversations`"));
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn answered(turn: u32, ttft: u64, gaps: &[u64], usage: Option<Usage>) -> Record {
    let gaps: Vec<_> = gaps.iter().map(|gap| ms(*gap)).collect();
    let latency = ms(ttft) + gaps.iter().sum::<Duration>();
    let events = gaps.len() as u64 + 1;
    let answer = Answer { ttft: ms(ttft), latency, gaps, usage, events, ..Answer::default() };
    Record { conversation: 0, turn, due: ms(ttft), outcome: Ok(answer), dropped_turns: 0 }
}

fn failed(failure: Failure, dropped_turns: u32) -> Record {
    Record { conversation: 1, turn: 0, due: ms(0), outcome: Err(failure), dropped_turns }
}

fn usage(prompt_tokens: u64, cached_tokens: u64, completion_tokens: u64) -> Option<Usage> {
    Some(Usage { prompt_tokens, completion_tokens, cached_tokens })
}

fn measured(records: Vec<Record>) -> Measured {
    Measured { records, duration: Duration::from_secs(2), unfinished: 0, stopped: false }
}

fn view(objectives: &[&str]) -> View {
    let objectives = objectives.iter().map(|text| text.parse().unwrap()).collect();
    View { metrics: Metric::ALL.to_vec(), percentiles: vec![90.0, 99.9], objectives, detailed: false }
}

fn near(value: &serde_json::Value, wanted: f64) -> bool {
    // Three digits are kept of a time.
    value.as_f64().is_some_and(|value| (value - wanted).abs() <= wanted.abs() * 1e-3)
}

#[test]
fn numbers_of_a_report_are_those_of_its_records() {
    let records = vec![
        answered(0, 100, &[10, 20], usage(50, 0, 3)),
        answered(0, 200, &[30], usage(30, 20, 3)),
        answered(1, 300, &[], usage(20, 20, 1)),
        failed(Failure::Status { status: 503, message: "busy".into() }, 2),
        failed(Failure::Status { status: 503, message: "still busy".into() }, 0),
        failed(Failure::Timeout(ms(5)), 0),
    ];
    let report = Report::new(&measured(records), view(&[]));
    assert_eq!((report.completed, report.failed), (3, 3));
    assert_eq!(report.failures["http 503"], (2, "answered 503: busy".into()));
    assert_eq!(report.cached_share(), Some(0.4));
    let json = report.to_json(Map::new());
    for (name, wanted) in [
        ("completed", 3.0),
        ("failed", 3.0),
        ("dropped_turns", 2.0),
        ("duration", 2.0),
        ("total_input_tokens", 100.0),
        ("total_output_tokens", 7.0),
        ("total_cached_tokens", 40.0),
        ("request_throughput", 1.5),
        ("output_throughput", 3.5),
        ("total_token_throughput", 53.5),
        ("mean_ttft_ms", 200.0),
        ("median_ttft_ms", 200.0),
        ("p90_ttft_ms", 300.0),
        ("p99.9_e2el_ms", 300.0),
        ("mean_itl_ms", 20.0),
        // 30 ms over two tokens, and 30 ms over two: the second's events held more than one token.
        ("mean_tpot_ms", 15.0),
        ("std_tpot_ms", 0.0),
    ] {
        assert!(near(&json[name], wanted), "{name} is {}, not {wanted}", json[name]);
    }
    assert_eq!(json["request_goodput"], json!(null));
    assert_eq!(json["failures"]["timeout"], json!({ "count": 1, "first": "no end within 5ms" }));
    assert_eq!(json["turns"][1]["cached_tokens_share"], json!(1.0));
    assert_eq!((&json["interrupted"], &json["without_usage"]), (&json!(false), &json!(0)));
}

#[test]
fn a_good_request_keeps_to_every_objective() {
    let records = || {
        vec![
            answered(0, 100, &[10, 20], usage(1, 0, 3)),
            answered(0, 201, &[10, 20], usage(1, 0, 3)),
            answered(0, 200, &[], usage(1, 0, 1)),
            failed(Failure::Timeout(ms(5)), 0),
        ]
    };
    let goodput = |objectives: &[&str]| {
        Report::new(&measured(records()), view(objectives)).to_json(Map::new())["request_goodput"].as_f64()
    };
    assert_eq!(goodput(&["ttft:200"]), Some(1.0));
    assert_eq!(goodput(&["ttft:200", "tpot:14.9"]), Some(0.5));
    assert_eq!(goodput(&["ttft:200", "tpot:15", "e2el:130"]), Some(0.5));
    assert_eq!(goodput(&["e2el:1"]), Some(0.0));
    for (text, why) in [
        ("ttft", "\"ttft\" is not METRIC:MS"),
        ("tttft:1", "\"tttft\" is no metric; metrics are ttft, tpot, itl, e2el"),
        ("itl:5", "\"itl\" is of a token"),
        ("ttft:fast", "\"ttft:fast\" has no number of milliseconds above 0"),
        ("ttft:0", "\"ttft:0\" has no number"),
        ("ttft:NaN", "\"ttft:NaN\" has no number"),
    ] {
        let error = text.parse::<Objective>().unwrap_err();
        assert!(error.starts_with(why), "{error}");
    }
}

#[test]
fn a_report_without_answers_says_so_with_nothing_instead_of_zero() {
    let report = Report::new(&measured(vec![failed(Failure::Connect("refused".into()), 0)]), view(&[]));
    let json = report.to_json(Map::new());
    assert_eq!((&json["mean_ttft_ms"], &json["cached_tokens_share"]), (&json!(null), &json!(null)));
    let mut table = Vec::new();
    report.write_table(&[], &mut table).unwrap();
    let table = String::from_utf8(table).unwrap();
    assert!(table.contains("Mean TTFT (ms):                          -"), "{table}");
    assert!(matches!(draw(&report, &measured(Vec::new())), Err(PlotError::Nothing)));
}

#[test]
fn an_answer_whose_tokens_nobody_counted_counts_its_events() {
    let report = Report::new(&measured(vec![answered(0, 100, &[10, 20], None)]), view(&[]));
    let json = report.to_json(Map::new());
    assert_eq!((&json["without_usage"], &json["total_output_tokens"]), (&json!(1), &json!(3)));
    assert!(near(&json["mean_tpot_ms"], 15.0));
}

#[test]
fn the_table_has_a_line_for_each_number_and_the_view_says_which() {
    let records = vec![answered(0, 100, &[10, 20], usage(50, 25, 3)), failed(Failure::Timeout(ms(5)), 1)];
    let only_ttft = View { metrics: vec![Metric::Ttft], ..view(&["ttft:1000"]) };
    let report = Report::new(&Measured { unfinished: 4, stopped: true, ..measured(records) }, only_ttft);
    let mut table = Vec::new();
    report.write_table(&[("Request rate configured (RPS)", "4.00".into())], &mut table).unwrap();
    let table = String::from_utf8(table).unwrap();
    let squeezed: Vec<String> =
        table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for line in [
        "============ Serving Benchmark Result ============",
        "Successful requests: 1",
        "Failed requests: 1",
        "timeout: 1",
        "Turns not sent after a failure: 1",
        "Requests not finished (interrupted): 4",
        "Request rate configured (RPS): 4.00",
        "Benchmark duration (s): 2.00",
        "Cached input tokens (%): 50.00",
        "Request goodput (req/s): 0.50",
        "---------------Time to First Token----------------",
        "P99.9 TTFT (ms): 100.03",
    ] {
        assert!(squeezed.iter().any(|squeezed| squeezed == line), "{line:?} is not in\n{table}");
    }
    assert!(!table.contains("TPOT") && !table.contains("without usage"), "{table}");
}

#[test]
fn details_are_in_the_order_in_which_requests_were_due() {
    let records = vec![answered(0, 300, &[], None), answered(0, 100, &[10], None), failed(Failure::Timeout(ms(5)), 0)];
    let detailed = View { detailed: true, ..view(&[]) };
    let json = Report::new(&measured(records), detailed).to_json(Map::new());
    assert_eq!(json["start_times"], json!([0.0, 0.1, 0.3]));
    assert_eq!(json["ttfts"], json!([null, 0.1, 0.3]));
    assert_eq!(json["itls"], json!([[], [0.01], []]));
    assert_eq!(json["errors"], json!(["no end within 5ms", "", ""]));
}

#[test]
fn a_picture_has_a_curve_for_each_metric_and_a_point_for_each_request() {
    let run = measured(vec![answered(0, 100, &[10, 20], None), answered(0, 150, &[10], None)]);
    let svg = draw(&Report::new(&run, view(&[])), &run).unwrap();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    assert!(svg.matches("<polyline").count() >= 4, "{svg}");
    assert_eq!(svg.matches("<circle").count(), 4, "two points of each of two requests");
    for metric in Metric::ALL {
        assert!(svg.contains(&metric.title()), "{}", metric.title());
    }
    // One request that took no time at all is drawn too.
    let instant = measured(vec![answered(0, 0, &[], None)]);
    assert!(draw(&Report::new(&instant, view(&[])), &instant).is_ok());
}
