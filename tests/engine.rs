//! The exact mode against reference runs of the real model. The whole file is checked by `conformance engine`.

// The binary's own code: the test uses what it needs of it.
#[allow(dead_code)]
#[path = "bin/engine.rs"]
mod engine;

use engine::{Checker, TOLERANCE, read};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/vectors/engine/smollm2_deq_f32_reference.json");

#[test]
fn reference_runs_of_the_real_model_agree() {
    let vectors = read(FILE).expect("the vectors are part of the repository");
    assert!(vectors.prompts.len() >= 20 && vectors.chats.len() >= 9);
    let Ok(model) = std::env::var("STARLING_MODEL") else {
        eprintln!("SKIPPED: STARLING_MODEL names no model file");
        return;
    };
    let mut checker = Checker::new(&model, TOLERANCE).expect("the model loads");
    for case in vectors.prompts.iter().step_by(5).chain(vectors.chats.iter().step_by(4)) {
        checker.check(case).unwrap_or_else(|what| panic!("{}: {what}", case.name));
    }
    assert!(checker.worst > 0.0, "something was compared");
}

#[test]
fn a_reference_that_differs_is_found() {
    let Ok(model) = std::env::var("STARLING_MODEL") else {
        eprintln!("SKIPPED: STARLING_MODEL names no model file");
        return;
    };
    let vectors = read(FILE).expect("the vectors are part of the repository");
    // Another prompt's continuation is not this one's.
    let text = std::fs::read_to_string(FILE).expect("read a moment ago");
    let mut json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    json["prompts"][0]["prompt_ids"] = json["prompts"][1]["prompt_ids"].clone();
    let swapped: engine::Vectors = serde_json::from_value(json).expect("vectors");
    let mut checker = Checker::new(&model, TOLERANCE).expect("the model loads");
    assert!(checker.check(&swapped.prompts[0]).is_err());
    assert!(checker.check(&vectors.prompts[0]).is_ok());
}

/// Gemma's runs with what each may differ by, in nats. The first was computed in f64. That of llama.cpp in f32 differs from
/// it by 2.3e-3, and that of its defaults, in bytes and f16, by half a nat.
const GEMMA: [(&str, f64); 3] = [
    ("gemma3_270m_long_f64_reference.json", TOLERANCE),
    ("gemma3_270m_long_deq_f32_reference.json", 4e-3),
    ("gemma3_270m_long_llamacpp.json", 1.0),
];

#[test]
fn reference_runs_over_several_windows_agree() {
    let files =
        GEMMA.map(|(file, tolerance)| (format!("{}/vectors/engine/{file}", env!("CARGO_MANIFEST_DIR")), tolerance));
    let vectors = files.map(|(file, tolerance)| (read(&file).expect("part of the repository"), tolerance));
    let Ok(model) = std::env::var("STARLING_GEMMA") else {
        eprintln!("SKIPPED: STARLING_GEMMA names no model file of Gemma 3 270M (Q4_K_M)");
        return;
    };
    for (vectors, tolerance) in vectors {
        let mut checker = Checker::new(&model, tolerance).expect("the model loads");
        for case in &vectors.prompts {
            checker.check(case).unwrap_or_else(|what| panic!("{} within {tolerance}: {what}", case.name));
        }
        assert!(checker.worst > 0.0, "something was compared");
        eprintln!("largest difference {:.2e} nats (tolerance {tolerance:.0e})", checker.worst);
    }
}
