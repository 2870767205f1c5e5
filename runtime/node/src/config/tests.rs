use super::*;
use std::ffi::OsString;
use std::io::Write;

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn load(text: &str, env: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let file = file(text);
    let mut sources = Sources { file: Some(file.path().into()), ..Sources::default() };
    sources.env = env.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect();
    for (path, value) in flags {
        set(&mut sources.flags, path, *value);
    }
    Config::load(&sources)
}

/// The problems of a configuration file, without the file's name.
fn problems(text: &str) -> Vec<String> {
    problems_with(text, &[])
}

fn problems_with(text: &str, env: &[(&str, &str)]) -> Vec<String> {
    match load(text, env, &[]) {
        Err(ConfigError::Invalid(problems)) => {
            problems.into_iter().map(|p| Problem { origin: None, ..p }.to_string()).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn nothing_said_means_the_defaults() {
    assert_eq!(Config::load(&Sources::default()).unwrap(), Config::default());
    assert_eq!(load("", &[("STARLING_CONFIG", "x"), ("HOME", "/")], &[]).unwrap(), Config::default());
}

#[test]
fn later_sources_win() {
    let text =
        "[node]\nname = 'file'\n[cluster]\nname = 'file'\n[ranks]\ncount = 3\n[engine.timed]\ndecode-per-step = '1ms'";
    let env = [("STARLING__NODE__NAME", "env"), ("STARLING__ENGINE__TIMED__DECODE_PER_STEP", "2ms")];
    let config = load(text, &env, &[("engine.timed.prefill-per-token", "3ns")]).unwrap();
    assert_eq!((config.node.name.as_str(), config.cluster.name.as_str(), config.ranks.count), ("env", "file", 3));
    assert_eq!(config.engine.timed.decode_per_step, Period::millis(2));
    assert_eq!(config.engine.timed.prefill_per_token, "3ns".parse().unwrap());
    assert_eq!(load(text, &env, &[("node.name", "flag")]).unwrap().node.name, "flag");
}

#[test]
fn a_preset_lies_below_the_file() {
    let mut sources = Sources::default();
    set(&mut sources.preset, "ranks.count", 2);
    assert_eq!(Config::load(&sources).unwrap().ranks.count, 2);
    let file = file("ranks.count = 5");
    sources.file = Some(file.path().into());
    assert_eq!(Config::load(&sources).unwrap().ranks.count, 5);
}

#[test]
fn the_later_way_to_name_the_model_replaces_the_earlier() {
    let text = "model.path = '/m/tiny.gguf'";
    assert_eq!(load(text, &[], &[]).unwrap().model.source(), ModelSource::Path("/m/tiny.gguf".into()));
    assert_eq!(load(text, &[], &[]).unwrap().model.id(), "tiny");
    assert_eq!(load("model.path = '/m/Tiny-1.5'", &[], &[]).unwrap().model.id(), "Tiny-1.5");
    let named = load(text, &[("STARLING__MODEL__NAME", "smollm2")], &[]).unwrap();
    assert_eq!(named.model.source(), ModelSource::Named("smollm2".into()));
    let flag = load(text, &[("STARLING__MODEL__NAME", "smollm2")], &[("model.path", "/x.gguf")]).unwrap();
    assert_eq!(flag.model.source(), ModelSource::Path("/x.gguf".into()));
    let both = problems("model.path = '/m'\nmodel.name = 'smollm2'");
    assert_eq!(both, ["model.path: \"/m\" and model.name \"smollm2\" exclude each other"]);
}

#[test]
fn unknown_keys_are_refused_with_the_nearest_name() {
    let text = "[api]\nbody-limt = '1MiB'\n[egnine]\nkind = 'cpu'\n[engine.timed]\nx-y-z = 1";
    assert_eq!(
        problems(text),
        [
            "api.body-limt: unknown key; did you mean api.body-limit?",
            "egnine: unknown key; did you mean engine?",
            "engine.timed.x-y-z: unknown key",
        ]
    );
    let error = load("", &[("STARLING__API__LISTN", "x")], &[]).unwrap_err().to_string();
    let says = "api.listn: unknown key; did you mean api.listen? (from the environment variable STARLING__API__LISTN)";
    assert_eq!(error, says);
    assert_eq!(problems("[node]\nbody_limit = 1"), ["node.body_limit: unknown key; did you mean api.body-limit?"]);
}

#[test]
fn a_wrong_value_is_named_with_its_key_and_origin() {
    let what = problems("[api]\nbody-limit = '12 parsecs'");
    assert!(what[0].starts_with("api.body-limit: \"12 parsecs\" is not a size"), "{what:?}");
    let what = problems("[limits]\nprompt-wait = '5'");
    assert!(what[0].starts_with("limits.prompt-wait: \"5\" is not a duration"), "{what:?}");
    let what = problems("[admin]\nlisten = 'localhost:1'");
    assert!(what[0].starts_with("admin.listen: \"localhost:1\" is not an address and port"), "{what:?}");
    let what = problems("[engine]\nkind = 'gpu'");
    assert_eq!(what, ["engine.kind: unknown variant `gpu`, expected `cpu` or `timed`"]);
    assert_eq!(problems("engine = 3"), ["engine: 3 is not a table"]);
    assert!(problems("[ranks]\ncount = -1")[0].starts_with("ranks.count: invalid value: integer `-1`"));
    assert!(problems("[ranks]\ncount = []")[0].starts_with("ranks.count: invalid type: sequence"));

    let env = [("STARLING__RANKS__COUNT", "two")];
    assert_eq!(problems_with("", &env), ["ranks.count: \"two\" is not a whole number"]);
    assert_eq!(problems_with("", &[("STARLING__RANKS", "2")]), ["ranks: \"2\" is not a table"]);
    let error = load("[ranks]\ncount = 0", &[], &[]).unwrap_err().to_string();
    assert!(error.starts_with("ranks.count: 0 is not in 1 to 64 (in "), "{error}");
}

#[test]
fn placement_is_checked_by_the_core() {
    let env = [("STARLING__PLACEMENT__STRICT_AFFINITY", "false"), ("STARLING__PLACEMENT__LOAD_WEIGHT", "0.5")];
    let config = load("placement.policy = 'kv-aware'", &env, &[]).unwrap();
    assert_eq!(config.placement.policy, starling_core::placement::Policy::KvAware);
    assert_eq!((config.placement.strict_affinity, config.placement.load_weight), (false, 0.5));
    let what = problems("placement.new-conversations = 'anywhere'");
    assert!(
        what[0].starts_with("placement.new-conversations: unknown variant `anywhere`, expected one of"),
        "{what:?}"
    );
    let what = problems("placement.load-weight = -1.0");
    assert_eq!(what, ["placement: load-weight is -1; it must be a finite number that is at least 0"]);
    let what = problems("placement.polcy = 'balanced'");
    assert_eq!(what, ["placement.polcy: unknown key; did you mean placement.policy?"]);
    let env = [("STARLING__PLACEMENT__STRICT_AFFINITY", "maybe")];
    assert_eq!(problems_with("", &env), ["placement.strict-affinity: \"maybe\" is not true or false"]);
}

#[test]
fn published_names_of_placement_mean_our_keys() {
    use starling_core::placement::{NewConversations, Policy};
    let text = "[placement]\nenable_kv_cache_aware_routing = true\nkv_cache_routing_new_conv_placement = 'least_tokens'\n\
                kv_cache_routing_max_sessions = 9\ntimeout_iters = 3";
    let config = load(text, &[], &[]).unwrap();
    assert_eq!(config.placement.policy, Policy::KvAware);
    assert_eq!(config.placement.new_conversations, NewConversations::LeastTokens);
    assert_eq!((config.placement.conversations_max, config.placement.balance_timeout_steps), (9, 3));

    let env = [
        ("STARLING__PLACEMENT__KV_CACHE_ROUTING_MAX_SESSIONS", "11"),
        ("STARLING__PLACEMENT__KV_CACHE_ROUTING_CONVERSATION_AFFINITY", "true"),
    ];
    let config = load("placement.conversations-max = 9", &env, &[]).unwrap();
    assert_eq!((config.placement.conversations_max, config.placement.policy), (11, Policy::Conversation));
    let later =
        load("placement.timeout_iters = 9", &[("STARLING__PLACEMENT__BALANCE_TIMEOUT_STEPS", "4")], &[]).unwrap();
    assert_eq!(later.placement.balance_timeout_steps, 4);

    let what = problems("placement.policy = 'balanced'\nplacement.kv_cache_routing_conversation_affinity = true");
    assert!(what[0].contains("policy is balanced, but kv_cache_routing_conversation_affinity = true"), "{what:?}");
    let what = problems("placement.kv_cache_routing_max_sessions = 'many'");
    assert!(what[0].starts_with("placement.conversations-max: invalid type"), "{what:?}");
}

#[test]
fn two_names_of_one_key_exclude_each_other() {
    for text in ["conversations-max = 9\nkv_cache_routing_max_sessions = 9", "balance = true\nenable_balance = true"] {
        let what = problems(&format!("[placement]\n{text}"));
        let names: Vec<&str> = text.lines().map(|line| line.split(' ').next().unwrap()).collect();
        assert_eq!(what.len(), 1, "{what:?}");
        assert!(names.iter().all(|name| what[0].contains(name)), "{what:?}");
    }
    let names = ["STARLING__PLACEMENT__LOAD_WEIGHT", "STARLING__PLACEMENT__KV_CACHE_ROUTING_LOAD_BALANCE_WEIGHT"];
    for env in [[(names[0], "1"), (names[1], "1")], [(names[1], "1"), (names[0], "1")]] {
        let what = problems_with("", &env);
        assert_eq!(what.len(), 1, "{what:?}");
        assert!(names.iter().all(|name| what[0].contains(name)), "{what:?}");
    }
    let unset = [(names[0], "0.5"), (names[1], "")];
    assert_eq!(load("", &unset, &[]).unwrap().placement.load_weight, 0.5);
}

#[test]
fn kv_keys_come_from_all_sources() {
    let env = [
        ("STARLING__KV__POOL_RATIO", "0.25, 0.75"),
        ("STARLING__KV__SNAPSHOT_OFFSETS_FROM_END", "0,32"),
        ("STARLING__KV__SIZING", "typical-step-retaining"),
    ];
    let kv = load("[kv]\nreuse-policy = 'per-conversation'\nturns-max = 5\nsizing = 'balanced'", &env, &[]).unwrap().kv;
    assert_eq!((kv.reuse_policy, kv.turns_max), (Some(ReusePolicy::PerConversation), 5));
    assert_eq!((kv.pool_ratio, kv.snapshot_offsets_from_end), (Some(vec![0.25, 0.75]), vec![0, 32]));
    assert_eq!(kv.sizing, Sizing::TypicalStepRetaining);
    let what = problems_with("", &[("STARLING__KV__POOL_RATIO", "0.25,most")]);
    assert_eq!(what, ["kv.pool-ratio: \"most\" is not a number"]);
    let what = problems("kv.reuse-policy = 'always'");
    assert!(what[0].starts_with("kv.reuse-policy: unknown variant `always`, expected one of"), "{what:?}");
    assert_eq!(problems("kv.turn-max = 1"), ["kv.turn-max: unknown key; did you mean kv.turns-max?"]);
}

#[test]
fn published_names_of_kv_mean_our_keys() {
    let text = "[kv]\ntokens_per_block = 32\nenable_partial_reuse = false\nenable_block_reuse = true\n\
                swa_endpoint_rewind_tokens = 0\npool_ratio = [0.5, 0.5]\navg_seq_len = 4096\nmax_util_for_resume = 0.95\n\
                reuse_match_backoff = 3\nhost_cache_size = 0\nenable_swa_scratch_reuse = false\n\
                [kv.block_reuse_config]\npolicy = 'per_conversation'\nmax_num_turns = 5\n\
                [kv.mamba_state_config]\nenable_branch_snapshot = true\nperiodic_snapshot_interval = 0\n\
                additional_snapshot_offsets_from_start = [128]\nadditional_snapshot_offsets_from_end = [0, 32]";
    let config = load(text, &[], &[]).unwrap();
    let ours = "[engine]\nblock-tokens = 32\n[kv]\npartial-reuse = false\npool-ratio = [0.5, 0.5]\nsequence-tokens = 4096\n\
                resume-utilisation-percent-max = 95\nmatch-backoff-tokens = 3\nreuse-policy = 'per-conversation'\n\
                turns-max = 5\nbranch-snapshots = true\nsnapshot-offsets-from-start = [128]\n\
                snapshot-offsets-from-end = [0, 32]";
    assert_eq!(config, load(ours, &[], &[]).unwrap());
    let later = load(text, &[("STARLING__KV__TURNS_MAX", "2")], &[]).unwrap();
    assert_eq!(later.kv.turns_max, 2);
    let flat = "kv.max_num_turns = 4\nkv.enable_branch_snapshot = true\nkv.additional_snapshot_offsets_from_end = [7]";
    let kv = load(flat, &[], &[]).unwrap().kv;
    assert_eq!((kv.turns_max, kv.branch_snapshots, kv.snapshot_offsets_from_end), (4, true, vec![7]));
}

#[test]
fn what_published_names_of_kv_cannot_mean_is_told() {
    for (text, says) in [
        ("kv.host_cache_size = 1024", "kv.host_cache_size: 1024 is not supported: ranks keep KV on the device alone"),
        (
            "kv.enable_block_reuse = false",
            "kv.enable_block_reuse: false is not supported: prefixes are always reusable",
        ),
        (
            "kv.mamba_state_config.periodic_snapshot_interval = 9",
            "kv.mamba_state_config.periodic_snapshot_interval: 9 is not",
        ),
        ("kv.block_reuse_config.polcy = 'x'", "kv.block_reuse_config.polcy: unknown key"),
        ("kv.max_util_for_resume = 1.5", "kv.max_util_for_resume: 1.5 is not a share from 0.01 to 1"),
        ("kv.max_util_for_resume = 'most'", "kv.max_util_for_resume: \"most\" is not a share"),
        (
            "kv.turns-max = 2\nkv.max_num_turns = 2",
            "kv.turns-max: kv.turns-max and kv.max_num_turns are two names of one key",
        ),
        (
            "kv.max_num_turns = 2\nkv.block_reuse_config.max_num_turns = 2",
            "kv.turns-max: kv.block_reuse_config.max_num_turns and kv.max_num_turns are two names of one key; give one",
        ),
        (
            "engine.block-tokens = 16\nkv.tokens_per_block = 16",
            "engine.block-tokens: engine.block-tokens and kv.tokens_per_block are two names of one key; give one",
        ),
        ("engine = 3\nkv.tokens_per_block = 16", "engine: 3 is not a table"),
        ("kv.block_reuse_config.policy = 'per_turn'", "kv.reuse-policy: unknown variant `per-turn`"),
    ] {
        let found = problems(text);
        assert!(found.len() == 1 && found[0].starts_with(says), "{text}: {found:?}");
    }
}

/// A configuration of three members with the files that the mesh of `node` needs, and more keys.
fn cluster_of_three(node: &str, more: &str) -> (String, tempfile::TempDir) {
    use starling_transport::{Authority, NodeName};
    let folder = tempfile::TempDir::new().unwrap();
    let authority = Authority::new("starling").unwrap();
    let made = authority.issue(&NodeName::new(node).unwrap(), 1).unwrap();
    let texts = [authority.certificate_pem(), made.certificate_pem, made.key_pem];
    let mut files = String::new();
    for (name, text) in ["authority", "certificate", "key"].iter().zip(texts) {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        files += &format!("{name} = {path:?}\n");
    }
    let members = "members = [{ name = 'node-0', mesh = '10.0.0.1:8002' }, { name = 'node-1', mesh = 'b:8002', ranks = 3 },\
                   'node-2=[::1]:8002/2']";
    (format!("node.name = '{node}'\n{more}\n[mesh]\n{files}[cluster]\n{members}"), folder)
}

#[test]
fn the_list_of_members_decides_how_many_ranks_a_node_has() {
    let (text, _pem) = cluster_of_three("node-1", "");
    let config = load(&text, &[], &[]).unwrap();
    assert_eq!((config.ranks.count, config.cluster.members.len()), (3, 3));
    assert_eq!(config.cluster.members[2].to_string(), "node-2=[::1]:8002/2");
    let (first, _pem) = cluster_of_three("node-0", "");
    assert_eq!(load(&first, &[], &[]).unwrap().ranks.count, 1);
    let (agrees, _pem) = cluster_of_three("node-1", "ranks.count = 3");
    assert!(load(&agrees, &[], &[]).is_ok());
    let (differs, _pem) = cluster_of_three("node-1", "ranks.count = 1");
    assert_eq!(problems(&differs), ["ranks.count: 1 is not the 3 of node-1 in cluster.members"]);
    let printed = config.to_toml().replace("keys = []\n", "");
    assert_eq!(load(&printed, &[], &[]).unwrap(), config);

    let env = [("STARLING__CLUSTER__MEMBERS", "node-0=10.0.0.1:8002, node-1=b:8002/3,node-2=[::1]:8002/2")];
    let without = text.split("[cluster]").next().unwrap();
    assert_eq!(load(without, &env, &[]).unwrap().cluster, config.cluster);
    let error = load("", &[("STARLING__CLUSTER__MEMBERS", "node-0=h")], &[]).unwrap_err().to_string();
    let says =
        "cluster.members[0]: \"h\" is not a host and port such as \"10.0.0.1:8002\" (from the environment variable";
    assert!(error.starts_with(says), "{error}");
}

#[test]
fn members_must_fit_each_other() {
    let of = |members: &str| problems(&format!("cluster.members = [{members}]\nmesh.listen = '127.0.0.1:1'"));
    assert!(load("cluster.members = ['node-0=h:1']", &[], &[]).is_ok(), "a cluster of one needs no mesh");
    for (members, says) in [
        ("'node-0=h:1', 'node-0=h:2'", "cluster.members: two members are named node-0"),
        ("'node-0=h:1', 'node-1=h:1'", "cluster.members: node-0 and node-1 are both at h:1"),
        ("'a=h:1', 'b=h:2'", "cluster.members: node.name \"node-0\" is not among them (a, b)"),
        ("'node-0=h:1', 'b=h:2/0'", "cluster.members[1].ranks: 0 is not in 1 to 64"),
    ] {
        let no_files = "mesh.authority: not given, and a cluster of 2 members needs it (see starling cert)";
        assert_eq!(of(members), [says, no_files]);
    }
    let many: Vec<String> = (0..65).map(|n| format!("'node-{n}=h:{}'", n + 1)).collect();
    assert_eq!(of(&many.join(","))[0], "cluster.members: 65 members are more than 64");
    for (member, says) in [
        ("{ name = 'A', mesh = 'h:1' }", "cluster.members[0].name: node name \"A\" is not 1 to 63"),
        ("{ name = 'a', mesh = 'h' }", "cluster.members[0].mesh: \"h\" is not a host and port"),
        ("{ name = 'a' }", "cluster.members[0]: missing field `mesh`"),
        ("{ nme = 'a' }", "cluster.members[0].nme: unknown field `nme`, expected one of"),
        ("3", "cluster.members[0]: invalid type: integer `3`, expected a member"),
    ] {
        let found = of(member);
        assert!(found.len() == 1 && found[0].starts_with(says), "{member}: {found:?}");
    }
}

#[test]
fn who_has_others_to_meet_needs_a_port_certificates_and_patience() {
    let (text, _pem) = cluster_of_three("node-0", "rounds.heartbeat-ms = 1001");
    assert_eq!(problems(&text), ["cluster.suspect-after-ms: 2000 is less than two rounds.heartbeat-ms of 1001"]);
    let (text, _pem) = cluster_of_three("node-0", "");
    let with = |key: &str, value: &str| match load(&text, &[], &[(key, value)]) {
        Err(ConfigError::Invalid(problems)) => problems.iter().map(Problem::to_string).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    let found = with("mesh.listen", "127.0.0.1:0");
    assert_eq!(found, ["mesh.listen: 127.0.0.1:0: the others need a port that they know (from the command line)"]);
    let found = with("mesh.key", "/no/such.key");
    assert!(found[0].starts_with("mesh.key: cannot read \"/no/such.key\": No such file"), "{found:?}");
    let found = with("mesh.authority", "/");
    assert!(found[0].starts_with("mesh.authority: cannot read \"/\": "), "{found:?}");
    let found = with("node.name", "node-2");
    let says = "mesh.certificate: is of node node-0 in cluster starling, and this is node node-2 in cluster starling";
    assert!(found[0].starts_with(says), "{found:?}");
    let found = with("cluster.name", "other");
    assert!(found[0].contains(", and this is node node-0 in cluster other (in "), "{found:?}");
    let (_, other) = cluster_of_three("node-0", "");
    let found = with("mesh.key", other.path().join("key").to_str().unwrap());
    assert!(found[0].starts_with("mesh.certificate: certificate of node-0 does not belong to its key"), "{found:?}");
    let found = with("mesh.authority", other.path().join("authority").to_str().unwrap());
    assert!(found[0].starts_with("mesh.certificate: certificate of node-0 would not be accepted"), "{found:?}");
}

#[test]
fn a_file_that_is_no_toml_or_not_there_is_named() {
    let error = load("[api\n", &[], &[]).unwrap_err().to_string();
    assert!(error.contains("is not TOML") && error.contains("line 1"), "{error}");
    let sources = Sources { file: Some("/no/such.toml".into()), ..Sources::default() };
    let error = Config::load(&sources).unwrap_err().to_string();
    assert!(error.starts_with("cannot read configuration \"/no/such.toml\""), "{error}");
    let mut not_text = tempfile::NamedTempFile::new().unwrap();
    not_text.write_all(b"\xff\xfe").unwrap();
    let sources = Sources { file: Some(not_text.path().into()), ..Sources::default() };
    assert!(matches!(Config::load(&sources), Err(ConfigError::Read { .. })));
}

#[test]
fn values_must_fit_each_other() {
    for (text, says) in [
        ("node.name = 'a b'", "node.name: node name \"a b\" is not 1 to 63 of a-z"),
        ("cluster.name = 'a b'", "cluster.name: \"a b\" is not 1 to 63 of a-z"),
        ("cluster.suspect-after-ms = 0", "cluster.suspect-after-ms: 0 is not in 1 to 600000"),
        ("cluster.stream-wait-s = 4000", "cluster.stream-wait-s: 4000 is not in 0 to 3600"),
        ("mesh.lanes = 5", "mesh.lanes: 5 is not in 1 to 4"),
        ("engine.block-tokens = 7", "engine.block-tokens: 7 is not in 8 to 256"),
        ("engine.block-tokens = 257", "engine.block-tokens: 257 is not in 8 to 256"),
        ("engine.context-tokens-max = 1", "engine.context-tokens-max: 1 is not in 2 to 16777216"),
        ("engine.kv-memory = '1KiB'", "engine.kv-memory: 1KiB is less than 1MiB"),
        ("engine.threads = 0", "engine.threads: 0 is not in 1 to 1024"),
        ("engine.step-tokens-max = 8", "engine.step-tokens-max: 8 is less than engine.sequences-max 64"),
        ("admin.listen = '127.0.0.1:8000'", "admin.listen: 127.0.0.1:8000 takes the port of api.listen"),
        ("admin.listen = '0.0.0.0:8000'", "admin.listen: 0.0.0.0:8000 takes the port of api.listen"),
        ("rounds.heartbeat-ms = 10", "rounds.heartbeat-ms: 10 is less than busy-interval-ms 20"),
        ("rounds.busy-interval-ms = 1", "rounds.busy-interval-ms: 1 is less than round-interval-ms-min 2"),
        ("limits.attempts-max = 0", "limits.attempts-max: 0 is not in 1 to 100"),
        ("limits.announce-wait = '1us'", "limits.announce-wait: 1us is less than 1ms"),
        ("model.name = 'gpt-9'", "model.name: \"gpt-9\" is not a known model (smollm2)"),
        ("telemetry.log = 'a=b=c'", "telemetry.log: \"a=b=c\" is not a log filter"),
        ("telemetry.otlp = 'collector:4317'", "telemetry.otlp: \"collector:4317\" is not an address"),
        ("kv.turns-max = 0", "kv.turns-max: 0 is not in 1 to 1024"),
        ("kv.conversations-max = 0", "kv.conversations-max: 0 is not in 1 to 16777216"),
        ("kv.conversation-ttl = '1us'", "kv.conversation-ttl: 1us is less than 1ms, and not 0s for never"),
        ("kv.scope-quota-percent = 101", "kv.scope-quota-percent: 101 is not in 1 to 100"),
        ("kv.resume-utilisation-percent-max = 0", "kv.resume-utilisation-percent-max: 0 is not in 1 to 100"),
        ("kv.pool-ratio = [0.5, 0.4]", "kv.pool-ratio: [0.5, 0.4] adds up to 0.9, not to 1"),
        ("kv.pool-ratio = [1.5, -0.5]", "kv.pool-ratio: -0.5 is not a share above 0"),
        ("kv.pool-ratio = []", "kv.pool-ratio: [] adds up to"),
        ("kv.sequence-tokens = 0", "kv.sequence-tokens: 0 is not in 1 to 16777216"),
        (
            "kv.sequence-tokens = 9000\nengine.context-tokens-max = 8192",
            "kv.sequence-tokens: 9000 is more than engine.context-tokens-max 8192",
        ),
        (
            "kv.endpoint-rewind-tokens = 64\nkv.reuse-policy = 'per-request'",
            "kv.endpoint-rewind-tokens: 64 goes with all-reusable only, kv.reuse-policy is \"per-request\"",
        ),
        ("kv.snapshot-offsets-from-start = [128, 0]", "kv.snapshot-offsets-from-start[1]: 0 is not in 1 to 16777216"),
        ("api.body-limit = '2GiB'", "api.body-limit: 2147483648 bytes is not in 1024 to 1073741824"),
    ] {
        let found = problems(text);
        assert!(found.len() == 1 && found[0].starts_with(says), "{text}: {found:?}");
    }
    assert!(load("admin.listen = '127.0.0.1:0'\napi.listen = '127.0.0.1:0'", &[], &[]).is_ok());
    assert_eq!(problems("ranks.count = 0\nengine.block-tokens = 1").len(), 2);
}

#[test]
fn keys_come_from_the_environment_or_a_file_and_are_redacted() {
    let keys_file = file("# ours\n\n sk-three \n");
    let text = format!("api.keys-file = {:?}", keys_file.path());
    let config = load(&text, &[("STARLING__API__KEYS", "sk-one, sk-two,")], &[]).unwrap();
    let keys: Vec<&str> = config.api.keys.iter().map(Secret::expose).collect();
    assert_eq!(keys, ["sk-one", "sk-two", "sk-three"]);
    let printed = config.to_toml() + &format!("{config:?}");
    assert!(!printed.contains("sk-") && printed.contains(REDACTED));

    assert!(problems("api.keys = ['sk-one']")[0].starts_with("api.keys: secrets are not read from the file"));
    let env = [("STARLING__API__KEYS", "sk-one,sk two")];
    assert_eq!(problems_with("", &env), ["api.keys: key 2 of 2 is not printable ASCII without spaces"]);
    assert_eq!(problems_with("", &[("STARLING__API__KEYS", " , ")]), ["api.keys: the list names nothing"]);
    let empty = file("# none\n");
    let text = format!("api.keys-file = {:?}", empty.path());
    assert!(problems(&text)[0].ends_with("holds no key"));
    assert!(problems("api.keys-file = '/no/keys'")[0].contains("cannot read \"/no/keys\""));
}

#[test]
fn the_common_log_variable_gives_way_to_the_particular_one() {
    let common = ("RUST_LOG", "debug");
    assert_eq!(load("telemetry.log = 'warn'", &[common], &[]).unwrap().telemetry.log, "debug");
    let both = load("", &[("STARLING__TELEMETRY__LOG", "trace"), common], &[]).unwrap();
    assert_eq!(both.telemetry.log, "trace");
    assert_eq!(load("", &[("RUST_LOG", "")], &[]).unwrap().telemetry.log, "info");
}

#[test]
fn what_is_printed_loads_again() {
    let text =
        "[model]\npath = '/m.gguf'\n[engine]\nthreads = 3\nkv-memory = '80GiB'\n[telemetry]\notlp = 'http://c:1'";
    let config = load(text, &[], &[]).unwrap();
    let printed = config.to_toml().replace("keys = []\n", "");
    assert_eq!(load(&printed, &[], &[]).unwrap(), config);
}

#[cfg(unix)]
#[test]
fn a_variable_that_is_no_text_is_named() {
    use std::os::unix::ffi::OsStringExt;
    let mut sources = Sources::default();
    sources.env.push(("STARLING__NODE__NAME".into(), OsString::from_vec(vec![0xff])));
    let error = Config::load(&sources).unwrap_err().to_string();
    assert!(error.starts_with("node.name: ") && error.contains("is not UTF-8"), "{error}");
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(32))]
    #[test]
    fn no_text_makes_it_panic(text: String, value: String) {
        let _ = load(&text, &[], &[]);
        for key in keys::Key::root().paths() {
            let _ = load(&format!("{key} = {value}"), &[(&keys::variable(&key), &value)], &[]);
        }
    }
}
