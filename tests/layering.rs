//! The layers of the workspace, as a test: who may depend on whom, and which crates stay where they belong.
//!
//! The table below is the architecture. To change it, write the reason down in `runtime/docs/adr` first.

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package, PackageId};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What one crate may have.
struct Layer {
    name: &'static str,
    /// Workspace crates it may depend on.
    workspace: &'static [&'static str],
    /// External crates it may name; `None`: any.
    external: Option<&'static [&'static str]>,
    /// Crates that must not be anywhere below it.
    never_below: &'static [&'static str],
}

const LAYERS: &[Layer] = &[
    Layer {
        name: "starling-core",
        workspace: &[],
        external: Some(&["serde", "thiserror", "xxhash-rust", "blake3", "hashbrown"]),
        never_below: &["tokio", "ractor", "quinn", "cudarc", "rand", "tracing", "bincode"],
    },
    Layer {
        name: "starling-gpu",
        workspace: &["starling-core"],
        external: Some(&["thiserror", "gemm", "half", "memmap2", "serde_json", "cudarc"]),
        never_below: &["tokio", "ractor", "quinn", "axum"],
    },
    Layer {
        name: "starling-transport",
        workspace: &[],
        external: Some(&[
            "serde",
            "thiserror",
            "bytes",
            "bincode",
            "quinn",
            "rustls",
            "rustls-webpki",
            "rcgen",
            "tokio",
            "tracing",
        ]),
        never_below: &["ractor", "axum", "gemm", "openraft"],
    },
    Layer {
        name: "starling-actors",
        workspace: &["starling-transport"],
        external: Some(&["ractor", "tokio", "tracing", "thiserror", "serde", "arc-swap", "bytes"]),
        never_below: &["starling-core", "starling-gpu", "axum", "gemm", "cudarc"],
    },
    Layer {
        name: "starling-serving",
        workspace: &["starling-core", "starling-gpu", "starling-actors"],
        external: Some(&["tokio", "tracing", "thiserror", "serde"]),
        never_below: &["axum", "clap", "tokenizers", "opentelemetry"],
    },
    Layer {
        name: "starling-sim",
        workspace: &["starling-core", "starling-gpu"],
        external: Some(&["serde", "serde_json", "thiserror"]),
        never_below: &["tokio", "ractor", "quinn", "rand"],
    },
    Layer {
        name: "starling",
        workspace: &[
            "starling-core",
            "starling-gpu",
            "starling-transport",
            "starling-actors",
            "starling-serving",
            "starling-sim",
        ],
        external: None,
        never_below: &["openssl", "native-tls"],
    },
];

/// The node alone talks to people and machines, so nobody else may name these.
const NODE_ONLY: &[&str] = &[
    "axum",
    "clap",
    "hf-hub",
    "indicatif",
    "minijinja",
    "openraft",
    "opentelemetry",
    "opentelemetry-otlp",
    "opentelemetry_sdk",
    "prometheus-client",
    "schemars",
    "strsim",
    "tokenizers",
    "toml",
    "tracing-subscriber",
    "zip",
];

/// Packages that exist to use the others, in any combination.
fn is_outside_the_layers(package: &Package, root: &Path) -> bool {
    let manifest = package.manifest_path.as_std_path();
    ["examples", "tests"].iter().any(|folder| manifest.starts_with(root.join(folder)))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package lies in the workspace").to_path_buf()
}

fn read(relative: &str) -> String {
    let path = root().join(relative);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
}

/// The dependency graph of this machine's platform: resolving others would download crates that no build here needs.
fn metadata() -> Metadata {
    let rustc = Command::new("rustc").arg("-vV").output().expect("rustc runs: it built this test");
    let rustc = String::from_utf8(rustc.stdout).expect("rustc prints UTF-8");
    let host = rustc.lines().find_map(|line| line.strip_prefix("host: ")).expect("rustc -vV names its host");
    MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .other_options(["--locked", "--filter-platform", host].map(String::from).to_vec())
        .exec()
        .expect("cargo metadata reads the workspace")
}

fn layer_of(package: &Package) -> Option<&'static Layer> {
    LAYERS.iter().find(|layer| package.name.as_str() == layer.name)
}

fn assert_none(offenders: Vec<String>) {
    assert!(offenders.is_empty(), "\n{}", offenders.join("\n"));
}

/// Everything below `from` by normal and build dependencies, with the crate that brought it in.
fn below(metadata: &Metadata, from: &PackageId) -> BTreeMap<String, String> {
    let resolve = metadata.resolve.as_ref().expect("cargo metadata resolves the graph");
    let nodes: BTreeMap<_, _> = resolve.nodes.iter().map(|node| (&node.id, node)).collect();
    let names: BTreeMap<_, _> = metadata.packages.iter().map(|p| (&p.id, p.name.to_string())).collect();
    let (mut found, mut open, mut seen) = (BTreeMap::new(), vec![from], BTreeSet::from([from]));
    while let Some(id) = open.pop() {
        for dependency in &nodes[id].deps {
            if dependency.dep_kinds.iter().all(|kind| kind.kind == DependencyKind::Development) {
                continue;
            }
            if seen.insert(&dependency.pkg) {
                found.insert(names[&dependency.pkg].clone(), names[id].clone());
                open.push(&dependency.pkg);
            }
        }
    }
    found
}

#[test]
fn every_member_is_in_the_table() {
    let (metadata, root) = (metadata(), root());
    let unknown = metadata.workspace_packages().into_iter().filter(|package| {
        let named = layer_of(package).is_some();
        named == is_outside_the_layers(package, &root)
    });
    assert_none(
        unknown.map(|package| format!("{} has no row in LAYERS (or has one it must not have)", package.name)).collect(),
    );
}

#[test]
fn a_crate_depends_only_on_what_its_layer_allows() {
    let metadata = metadata();
    let mut offenders = Vec::new();
    for package in metadata.workspace_packages() {
        let Some(layer) = layer_of(package) else {
            continue;
        };
        for dependency in package.dependencies.iter().filter(|d| d.kind != DependencyKind::Development) {
            let name = dependency.name.as_str();
            let allowed = match dependency.path {
                Some(_) => layer.workspace.contains(&name),
                None => layer.external.is_none_or(|external| external.contains(&name)),
            };
            if !allowed {
                offenders.push(format!("{} must not depend on {name}", layer.name));
            }
        }
    }
    assert_none(offenders);
}

#[test]
fn what_a_layer_must_never_have_is_nowhere_below_it() {
    let metadata = metadata();
    let mut offenders = Vec::new();
    for package in metadata.workspace_packages() {
        let Some(layer) = layer_of(package) else {
            continue;
        };
        let below = below(&metadata, &package.id);
        for never in layer.never_below {
            if let Some(by) = below.get(*never) {
                offenders.push(format!("{} must not have {never} below it; {by} brings it in", layer.name));
            }
        }
    }
    assert_none(offenders);
}

#[test]
fn only_the_node_names_http_command_line_and_telemetry() {
    let metadata = metadata();
    let mut offenders = Vec::new();
    for package in metadata.workspace_packages().into_iter().filter(|package| package.name != "starling") {
        for dependency in package.dependencies.iter().filter(|d| d.kind != DependencyKind::Development) {
            if NODE_ONLY.contains(&dependency.name.as_str()) {
                offenders.push(format!("{} must not depend on {}", package.name, dependency.name));
            }
        }
    }
    assert_none(offenders);
}

#[test]
fn nothing_but_examples_and_tests_depends_on_the_node() {
    let (metadata, root) = (metadata(), root());
    let mut offenders = Vec::new();
    for package in metadata.workspace_packages() {
        let outside = is_outside_the_layers(package, &root);
        if !outside && package.dependencies.iter().any(|dependency| dependency.name == "starling") {
            offenders.push(format!("{} must not depend on starling", package.name));
        }
    }
    assert_none(offenders);
}

/// Versions of a crate in the lock file, on whatever platform it is used.
fn locked_versions(lock: &str, name: &str) -> Vec<String> {
    let header = format!("name = \"{name}\"");
    let versions = lock.split("[[package]]").filter(|package| package.lines().any(|line| line == header));
    versions
        .filter_map(|package| package.lines().find_map(|line| line.strip_prefix("version = ")))
        .map(|version| version.trim_matches('"').to_string())
        .collect()
}

/// Two crypto providers in one graph make rustls panic when it has to choose; C libraries of TLS are not wanted at all.
#[test]
fn no_second_crypto_library_is_in_the_graph() {
    // The lock file and the metadata also have what other platforms and features would need; the tree is what is built.
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let tree = Command::new(cargo)
        .args(["tree", "--workspace", "--locked", "--edges", "all", "--prefix", "none", "--format", "{p}"])
        .current_dir(root())
        .output()
        .expect("cargo runs: it built this test");
    let tree = String::from_utf8(tree.stdout).expect("cargo prints UTF-8");
    let built: BTreeSet<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(built.contains("aws-lc-rs") && built.contains("quinn"), "the graph is not read as expected");
    assert_none(
        ["ring", "openssl-sys", "native-tls"].into_iter().filter(|n| built.contains(n)).map(String::from).collect(),
    );
}

/// 2.0.1 is the last release that works; 3.0.0 is a compile error.
#[test]
fn bincode_is_pinned() {
    assert_eq!(locked_versions(&read("Cargo.lock"), "bincode"), ["2.0.1"]);
}

/// `(name, line number, has a reason)` for each external crate of `[workspace.dependencies]`.
fn workspace_dependencies(manifest: &str) -> Vec<(&str, usize, bool)> {
    let mut found = Vec::new();
    let (mut inside, mut commented) = (false, false);
    for (number, line) in manifest.lines().enumerate() {
        if line.starts_with('[') {
            inside = line == "[workspace.dependencies]";
        }
        let named = line.split_once(" = ").filter(|_| inside && !line.starts_with('#'));
        if let Some((name, value)) = named
            && !name.starts_with("starling")
        {
            let reason = value.rsplit_once('#').is_some_and(|(_, reason)| reason.trim().len() >= 4);
            found.push((name.trim(), number + 1, reason || commented));
        }
        // A `# -- heading` groups lines and gives no reason.
        commented = line.starts_with('#') && !line.starts_with("# --");
    }
    found
}

#[test]
fn every_dependency_of_the_workspace_has_a_reason() {
    let manifest = read("Cargo.toml");
    let dependencies = workspace_dependencies(&manifest);
    assert!(dependencies.len() > 10, "the root manifest is not read as expected");
    let bare = dependencies.iter().filter(|(_, _, reason)| !reason);
    assert_none(bare.map(|(name, line, _)| format!("Cargo.toml:{line} {name} has no reason")).collect());
}

#[test]
fn every_dependency_of_the_workspace_is_used_by_a_member() {
    let (metadata, manifest) = (metadata(), read("Cargo.toml"));
    let used: BTreeSet<&str> = metadata
        .workspace_packages()
        .iter()
        .flat_map(|package| package.dependencies.iter().map(|dependency| dependency.name.as_str()))
        .collect();
    let unused = workspace_dependencies(&manifest).into_iter().filter(|(name, _, _)| !used.contains(name));
    assert_none(unused.map(|(name, line, _)| format!("Cargo.toml:{line} {name} is used by no member")).collect());
}

#[test]
fn members_take_their_dependencies_from_the_workspace() {
    let metadata = metadata();
    let mut offenders = Vec::new();
    for package in metadata.workspace_packages() {
        let manifest = std::fs::read_to_string(&package.manifest_path).expect("a member has a manifest");
        let mut section = "";
        for (number, line) in manifest.lines().enumerate() {
            if line.starts_with('[') {
                section = line;
            }
            let named = section.ends_with("dependencies]") && line.contains('=');
            if named && !line.contains("workspace = true") {
                offenders.push(format!("{}:{} {line}", package.manifest_path, number + 1));
            }
        }
    }
    assert_none(offenders);
}

/// A supervisor sees a child's panic because it unwinds.
#[test]
fn panics_unwind_in_every_profile() {
    let manifest = read("Cargo.toml");
    assert!(!manifest.contains("panic = \"abort\""), "a profile aborts on panic; supervision depends on unwinding");
}

#[test]
fn reasons_are_found_on_the_line_or_above_it() {
    let manifest = [
        "[workspace.dependencies]",
        "# -- group",
        "bare = \"1\"",
        "# the reason",
        "above = \"1\"",
        "beside = { version = \"1\" } # the reason",
        "starling-core = { path = \"x\" }",
        "[profile.dev]",
        "panic = \"unwind\"",
    ];
    let manifest = manifest.join("\n");
    let found = workspace_dependencies(&manifest);
    assert_eq!(found, [("bare", 3, false), ("above", 5, true), ("beside", 6, true)]);
}
