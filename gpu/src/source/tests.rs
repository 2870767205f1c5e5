use super::*;
use crate::testing::{FolderWriter, SafetensorsWriter, TinyModel};
use ::safetensors::tensor::{Dtype, SafeTensors, TensorView};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Two tensors of different types, the second one of no round size.
fn writer() -> SafetensorsWriter {
    let mut writer = SafetensorsWriter::default();
    writer.tensor("a", TensorType::F32, &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    writer.tensor("b", TensorType::Bf16, &[5], &[0.5, -0.5, 1.5, -1.5, 2.0]);
    writer
}

fn opened(bytes: Vec<u8>) -> Result<Safetensors, ModelError> {
    Safetensors::from_bytes(Path::new("w.safetensors"), bytes)
}

fn refusal(bytes: Vec<u8>) -> String {
    opened(bytes).expect_err("refused").to_string()
}

/// The refusal of a header in which one value was replaced.
fn with_value(pointer: &str, value: Value) -> String {
    let mut header = Value::Object(writer().header());
    *header.pointer_mut(pointer).expect("there") = value;
    refusal(writer().with_header(&header.to_string()))
}

#[test]
fn tensors_have_their_type_shape_and_bytes_with_the_row_length_first() {
    let file = opened(writer().to_bytes()).unwrap();
    assert_eq!(file.names().collect::<Vec<_>>(), ["a", "b"]);
    let a = file.tensor("a").unwrap();
    assert_eq!((a.kind, a.dims), (TensorType::F32, vec![3, 2]));
    assert_eq!(a.bytes[..8], [0, 0, 128, 63, 0, 0, 0, 64]);
    let b = file.tensor("b").unwrap();
    assert_eq!((b.kind, b.dims, b.bytes.len()), (TensorType::Bf16, vec![5], 10));
    assert_eq!(file.tensor("c"), None);
}

#[test]
fn the_formats_own_library_reads_what_we_write_and_writes_what_we_read() {
    let bytes = writer().to_bytes();
    let theirs = SafeTensors::deserialize(&bytes).unwrap();
    let ours = opened(bytes.clone()).unwrap();
    assert_eq!(theirs.tensor("a").unwrap().shape(), [2, 3]);
    assert_eq!(theirs.tensor("b").unwrap().dtype(), Dtype::BF16);
    for name in ["a", "b"] {
        assert_eq!(theirs.tensor(name).unwrap().data(), ours.tensor(name).unwrap().bytes);
    }

    let numbers: Vec<u8> = (0..48).collect();
    let views = [
        ("half", TensorView::new(Dtype::F16, vec![2, 3, 2], &numbers[..24]).unwrap()),
        ("whole", TensorView::new(Dtype::F32, vec![3, 4], &numbers).unwrap()),
        ("none", TensorView::new(Dtype::F32, vec![0], &[]).unwrap()),
    ];
    let about = std::collections::HashMap::from([("format".to_string(), "pt".to_string())]);
    let read = opened(::safetensors::serialize(views, Some(about)).unwrap()).unwrap();
    let half = read.tensor("half").unwrap();
    assert_eq!((half.kind, &half.dims[..], half.bytes), (TensorType::F16, &[2, 3, 2][..], &numbers[..24]));
    assert_eq!(read.tensor("whole").unwrap().bytes, numbers);
    assert_eq!(read.tensor("none").unwrap().dims, [0]);
}

#[test]
fn a_file_cut_at_any_byte_or_with_bytes_behind_is_refused() {
    let bytes = writer().to_bytes();
    for end in 0..bytes.len() {
        let message = refusal(bytes[..end].to_vec());
        assert!(message.starts_with("w.safetensors"), "cut at {end}: {message}");
    }
    let message = refusal([&bytes[..], &[0; 7]].concat());
    assert_eq!(message, "w.safetensors: the end of the file is malformed (7 bytes belong to no tensor)");
}

#[test]
fn a_false_length_is_refused_before_anything_is_read() {
    let bytes = writer().to_bytes();
    let with_length = |length: u64| refusal([&length.to_le_bytes(), &bytes[8..]].concat());
    assert!(with_length(u64::MAX).contains("a header of 18446744073709551615 bytes, at most 100000000"));
    assert!(with_length(50_000_000).contains("is truncated: the header needs 50000000 bytes at offset 8"));
    // The other byte order.
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(with_length(length.swap_bytes()).contains("the header's length is malformed"));
    assert!(with_length(0).contains("its JSON is malformed"));
    assert!(refusal(Vec::new()).contains("the header's length needs 8 bytes"));
    assert!(refusal(TinyModel::default().writer().to_bytes().0).contains("the header's length"));
}

#[test]
fn what_a_header_says_wrongly_is_named_with_the_tensor_and_the_value() {
    for (pointer, value, parts) in [
        ("/a/dtype", json!("I8"), ["tensor a has type I8", "not supported"]),
        ("/a/dtype", json!("F8_E4M3"), ["tensor a has type F8_E4M3", "not supported"]),
        ("/a/dtype", json!(7), ["tensor a", "its dtype is 7"]),
        ("/a/shape", json!([2, 4]), ["tensor a", "takes 32 bytes"]),
        ("/a/shape", json!([-1, 3]), ["tensor a", "its shape is [-1,3]"]),
        ("/a/shape", json!([2.5, 3]), ["tensor a", "its shape is [2.5,3]"]),
        ("/a/shape", json!("six"), ["tensor a", "its shape is \"six\""]),
        ("/a/shape", json!([u64::MAX, 3]), ["tensor a", "its shape overflows"]),
        ("/a/data_offsets", json!([0]), ["tensor a", "are 1 numbers, not 2"]),
        ("/a/data_offsets", json!([24, 0]), ["tensor a", "from 24 to 0"]),
        ("/a/data_offsets", json!([u64::MAX - 23, 0]), ["tensor a", "to 0"]),
        ("/a/data_offsets", json!([1000, 1024]), ["tensor a (24 bytes at offset 1000)", "ends outside the file"]),
        ("/b/data_offsets", json!([0, 10]), ["tensor", "is due"]),
        ("/b/data_offsets", json!([23, 33]), ["tensor b", "is due"]),
        ("/a", json!(null), ["tensor a", "its dtype is absent"]),
    ] {
        let message = with_value(pointer, value.clone());
        assert!(parts.iter().all(|part| message.contains(part)), "{pointer} = {value}: {message}");
        assert!(message.starts_with("w.safetensors: "), "{message}");
    }
    assert!(refusal(writer().with_header("[1]")).contains("it is an array, not an object"));
    assert!(refusal(writer().with_header(&"[".repeat(100_000))).contains("its JSON is malformed"));
    // A name of any length is cut.
    let long = format!("{{\"{}\":{{\"dtype\":\"Q9\"}}}}", "x".repeat(100_000));
    assert!(refusal(writer().with_header(&long)).len() < 300);
}

proptest! {
    #[test]
    fn no_change_of_a_file_makes_the_reader_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = writer().to_bytes();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(file) = opened(bytes) {
            for name in file.names() {
                let tensor = file.tensor(name).unwrap();
                let weights: usize = tensor.dims.iter().product();
                prop_assert_eq!(tensor.bytes.len(), weights * tensor.kind.block_bytes());
            }
        }
    }
}

fn tiny() -> FolderWriter {
    TinyModel { kind: TensorType::F16, ..TinyModel::default() }.folder_writer()
}

#[test]
fn a_folder_is_the_same_from_one_file_or_several() {
    let folder = tempfile::tempdir().unwrap();
    let (one, many) = (folder.path().join("one"), folder.path().join("many"));
    tiny().write(&one).unwrap();
    tiny().write_sharded(&many, 3).unwrap();
    let (one, many) = (Source::open(&one).unwrap(), Source::open(&many).unwrap());
    assert_eq!(one.names(), many.names());
    assert!(one.names().len() > 20 && one.gguf().is_none());
    for name in one.names() {
        assert_eq!(one.tensor(name), many.tensor(name), "{name}");
    }
    assert_eq!(one.tensor("model.norm.weight").unwrap().dims, [64]);
}

#[test]
fn a_file_is_opened_as_gguf() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    TinyModel::default().write(&path).unwrap();
    let source = Source::open(&path).unwrap();
    assert_eq!(source.path(), path);
    assert_eq!(source.names().len(), source.gguf().unwrap().tensors().count());
    assert_eq!(source.tensor("output_norm.weight").unwrap().dims, [64]);
    let weights = folder.path().join("w.safetensors");
    std::fs::write(&weights, writer().to_bytes()).unwrap();
    assert!(Source::open(&weights).unwrap_err().to_string().contains("is not a GGUF file"));
    assert!(Source::open(&folder.path().join("none")).unwrap_err().to_string().contains("none"));
}

#[test]
fn a_folder_that_lacks_a_file_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let refused = || Source::open(folder.path()).unwrap_err().to_string();
    assert!(refused().contains("config.json"), "{}", refused());
    std::fs::write(folder.path().join("config.json"), "{\"model_type\": \"llama\"").unwrap();
    assert!(refused().contains("config.json: its JSON is malformed"), "{}", refused());
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    assert!(refused().contains("model.safetensors"), "{}", refused());
}

/// What opening says of a sharded folder after one file in it was changed.
fn with_index(change: impl FnOnce(&Path, &mut Value)) -> String {
    let folder = tempfile::tempdir().unwrap();
    tiny().write_sharded(folder.path(), 2).unwrap();
    let path = folder.path().join("model.safetensors.index.json");
    let mut index = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(folder.path(), &mut index);
    std::fs::write(&path, index.to_string()).unwrap();
    Source::open(folder.path()).expect_err("refused").to_string()
}

#[test]
fn an_index_that_does_not_fit_the_files_is_refused() {
    let name = "model.norm.weight";
    let to = |file: Value| move |_: &Path, index: &mut Value| index["weight_map"][name] = file;
    for file in ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", ""] {
        let message = with_index(to(json!(file)));
        let wanted = format!("weight_map.{name} has value {} (it is not the name of a file", json!(file));
        assert!(message.contains(&wanted), "{message}");
    }
    assert!(with_index(to(json!(3))).contains("has value 3"));
    assert!(with_index(to(json!("absent.safetensors"))).contains("absent.safetensors"));
    assert!(with_index(|_, index| *index = json!({})).contains("key weight_map is missing"));
    assert!(with_index(|_, index| index["weight_map"] = json!([])).contains("weight_map is an array, not an object"));
    // In the map, and in none of the files, or in another one.
    let first = "model-00001-of-00002.safetensors";
    let surplus = with_index(|_, index| index["weight_map"]["model.surplus"] = json!(first));
    assert!(surplus.contains(first) && surplus.contains("tensor model.surplus is missing"), "{surplus}");
    let moved = with_index(|_, index| {
        let map = index["weight_map"].as_object_mut().unwrap();
        let (tensor, _) = map.iter().find(|(_, file)| *file != first).unwrap();
        let tensor = tensor.clone();
        map.insert(tensor, json!(first));
    });
    assert!(moved.contains(first) && moved.contains("is missing"), "{moved}");
    let twice = with_index(|folder, _| {
        std::fs::write(folder.join("model-00002-of-00002.safetensors"), tiny().weights.to_bytes()).unwrap();
    });
    assert!(twice.contains("it stands in") && twice.contains("too"), "{twice}");
}

#[test]
fn numbers_of_a_configuration_are_read_as_what_they_are() {
    let text = br#"{"n": 3, "big": 4294967296, "minus": -1, "x": 1e-6, "whole": 10000, "s": "t", "b": true, "z": null, "o": {"i": "j"}}"#;
    let json = Json::from_bytes(Path::new("config.json"), text).unwrap();
    assert_eq!(
        (json.get_u32("n").unwrap(), json.get_u32("none").unwrap(), json.get_u32("z").unwrap()),
        (Some(3), None, None)
    );
    assert_eq!((json.get_f32("x").unwrap(), json.get_f32("whole").unwrap()), (Some(1e-6), Some(10_000.0)));
    assert_eq!((json.get_str("s").unwrap(), json.get_bool("b").unwrap()), (Some("t"), Some(true)));
    let object = json.get_object("o").unwrap().unwrap();
    for (message, wanted) in [
        (json.get_u32("big").unwrap_err(), "metadata key big has value 4294967296 (does not fit 32 bits)"),
        (json.get_u32("minus").unwrap_err(), "metadata key minus has value -1 (does not fit 32 bits)"),
        (json.get_u32("x").unwrap_err(), "metadata key x is a number, not an integer"),
        (json.get_u32("s").unwrap_err(), "metadata key s is a string, not an integer"),
        (json.get_f32("b").unwrap_err(), "metadata key b is a bool, not a number"),
        (json.get_bool("n").unwrap_err(), "metadata key n is a number, not a bool"),
        (json.get_object("s").unwrap_err(), "metadata key s is a string, not an object"),
        (object.get_u32("i").unwrap_err(), "metadata key o.i is a string, not an integer"),
    ] {
        assert_eq!(message.to_string(), format!("config.json: {wanted}"));
    }
}
