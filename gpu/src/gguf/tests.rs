use super::*;
use crate::testing::{GgufWriter, TinyModel};

fn refusal(bytes: Vec<u8>) -> String {
    Gguf::from_bytes("m.gguf", bytes).expect_err("refused").to_string()
}

fn written(writer: &GgufWriter) -> Result<Gguf, ModelError> {
    Gguf::from_bytes("m.gguf", writer.to_bytes().0)
}

#[test]
fn every_value_type_is_read_back() {
    let values = [
        ("u8", Value::U8(200)),
        ("i8", Value::I8(-3)),
        ("u16", Value::U16(60_000)),
        ("i16", Value::I16(-300)),
        ("u32", Value::U32(4_000_000_000)),
        ("i32", Value::I32(-5)),
        ("f32", Value::F32(0.5)),
        ("bool", Value::Bool(true)),
        ("str", Value::Str("Ġgrün".into())),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f64", Value::F64(0.25)),
        ("a.u8", Value::Array(Array::U8(vec![1, 2]))),
        ("a.i8", Value::Array(Array::I8(vec![-1]))),
        ("a.u16", Value::Array(Array::U16(vec![1]))),
        ("a.i16", Value::Array(Array::I16(vec![-1]))),
        ("a.u32", Value::Array(Array::U32(vec![7, 8, 9]))),
        ("a.i32", Value::Array(Array::I32(vec![-7, 8]))),
        ("a.f32", Value::Array(Array::F32(vec![0.5, -0.5]))),
        ("a.bool", Value::Array(Array::Bool(vec![true, false]))),
        ("a.str", Value::Array(Array::Str(vec!["a".into(), String::new()]))),
        ("a.a", Value::Array(Array::Array(vec![Array::U8(vec![1]), Array::Str(vec![])]))),
        ("a.u64", Value::Array(Array::U64(vec![1 << 40]))),
        ("a.i64", Value::Array(Array::I64(vec![-1 << 40]))),
        ("a.f64", Value::Array(Array::F64(vec![0.125]))),
    ];
    let mut writer = GgufWriter::default();
    for (key, value) in &values {
        writer.set(key, value.clone());
    }
    let gguf = written(&writer).unwrap();
    assert_eq!(gguf.version(), 3);
    assert_eq!(gguf.metadata().count(), values.len());
    for (key, value) in &values {
        assert_eq!(gguf.get(key), Some(value), "{key}");
    }
}

#[test]
fn getters_convert_what_fits_and_refuse_the_rest() {
    let mut writer = GgufWriter::default();
    writer
        .set("u64", Value::U64(7))
        .set("big", Value::U64(1 << 40))
        .set("minus", Value::I32(-1))
        .set("text", Value::Str("x".into()))
        .set("kinds", Value::Array(Array::I32(vec![1, 3])));
    let gguf = written(&writer).unwrap();
    assert_eq!(gguf.get_u32("u64").unwrap(), Some(7));
    assert_eq!(gguf.get_u32("absent").unwrap(), None);
    assert_eq!(gguf.get_int_array("kinds").unwrap(), Some(vec![1, 3]));
    assert_eq!(gguf.get_str("text").unwrap(), Some("x"));
    let message = |error: ModelError| error.to_string();
    assert_eq!(
        message(gguf.get_u32("big").unwrap_err()),
        "m.gguf: metadata key big has value 1099511627776 (does not fit 32 bits)"
    );
    assert!(message(gguf.get_u32("minus").unwrap_err()).contains("-1"));
    assert_eq!(message(gguf.get_bool("text").unwrap_err()), "m.gguf: metadata key text is a string, not a bool");
    assert!(gguf.get_u32("text").is_err() && gguf.get_f32("text").is_err());
    assert!(gguf.get_str_array("kinds").is_err() && gguf.get_f32_array("kinds").is_err());
    assert!(gguf.get_str("u64").is_err() && gguf.get_int_array("text").is_err());
    assert_eq!(message(gguf.missing("absent")), "m.gguf: metadata key absent is missing");
}

#[test]
fn tensors_are_found_where_the_file_puts_them() {
    let mut writer = GgufWriter::default();
    writer.tensor("a", TensorType::F32, &[3, 1], &[1.0, 2.0, 3.0]).tensor("b", TensorType::F16, &[2], &[0.5, -0.5]);
    let gguf = written(&writer).unwrap();
    let names: Vec<_> = gguf.tensors().map(|(name, _)| name).collect();
    assert_eq!(names, ["a", "b"]);
    let a = gguf.tensor("a").unwrap();
    assert_eq!((a.kind, &a.dims[..]), (TensorType::F32, &[3, 1][..]));
    assert_eq!(gguf.tensor_bytes(a)[..4], 1.0_f32.to_le_bytes());
    assert_eq!(gguf.tensor_bytes(gguf.tensor("b").unwrap()), [0x00, 0x38, 0x00, 0xb8]);
}

#[test]
fn a_file_is_mapped_as_it_is_read_from_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    TinyModel::default().write(&path).unwrap();
    let (mapped, memory) = (Gguf::open(&path).unwrap(), TinyModel::default().gguf());
    assert!(mapped.metadata().eq(memory.metadata()));
    assert!(mapped.tensors().eq(memory.tensors()));
}

#[test]
fn a_file_cut_at_any_byte_is_refused() {
    let (bytes, header) = TinyModel { layers: 1, ..TinyModel::default() }.writer().to_bytes();
    for length in (0..header).chain([header, bytes.len() - 1]) {
        let message = refusal(bytes[..length].to_vec());
        assert!(message.contains("m.gguf"), "{length}: {message}");
    }
    assert!(Gguf::from_bytes("m.gguf", bytes).is_ok());
}

#[test]
fn no_changed_byte_of_the_header_makes_the_reader_panic_or_allocate_without_bound() {
    let mut writer = TinyModel { layers: 1, ..TinyModel::default() }.writer();
    writer.set("nested", Value::Array(Array::Array(vec![Array::U8(vec![1])])));
    let (mut bytes, header) = writer.to_bytes();
    for at in 0..header {
        let original = bytes[at];
        for change in [0xff, 0x80, 0x01] {
            bytes[at] = original ^ change;
            if let Ok(gguf) = Gguf::from_bytes("m.gguf", bytes.clone()) {
                gguf.tensors().for_each(|(_, entry)| assert!(gguf.tensor_bytes(entry).len() <= bytes.len()));
            }
        }
        bytes[at] = original;
    }
}

#[test]
fn what_is_no_gguf_file_is_named() {
    assert_eq!(
        refusal(b"PK\x03\x04rest".to_vec()),
        "m.gguf is not a GGUF file (8 bytes, begins with [50, 4b, 03, 04])"
    );
    assert_eq!(refusal(vec![]), "m.gguf is not a GGUF file (0 bytes, begins with [])");
    let error = Gguf::open("does/not/exist.gguf").unwrap_err().to_string();
    assert!(error.starts_with("cannot read model file does/not/exist.gguf: "), "{error}");
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(Gguf::open(folder.path()), Err(ModelError::Io { .. })));
    let empty = folder.path().join("empty.gguf");
    std::fs::write(&empty, b"").unwrap();
    assert!(matches!(Gguf::open(&empty), Err(ModelError::BadMagic { .. } | ModelError::Io { .. })));
}

#[test]
fn other_versions_are_named() {
    let (mut bytes, _) = TinyModel::default().writer().to_bytes();
    bytes[4] = 1;
    assert_eq!(refusal(bytes.clone()), "m.gguf has GGUF version 1; versions 2 and 3 are supported");
    bytes[4] = 2;
    assert_eq!(Gguf::from_bytes("m.gguf", bytes).unwrap().version(), 2);
}

#[test]
fn a_false_count_or_length_runs_into_the_end_of_the_file() {
    let (mut bytes, _) = GgufWriter::default().set("k", Value::Str("v".into())).to_bytes();
    let key_length_at = 24;
    bytes[key_length_at..key_length_at + 8].fill(0xff);
    let message = refusal(bytes);
    assert!(message.contains("is truncated: metadata key 0 needs 18446744073709551615 bytes"), "{message}");

    let (mut bytes, _) = GgufWriter::default().to_bytes();
    bytes[8..16].fill(0xff);
    assert!(refusal(bytes).contains("the name of tensor 0"));
}

#[test]
fn tensors_outside_the_file_and_of_unknown_types_are_named() {
    let mut writer = GgufWriter::default();
    writer.raw_tensor("w", 13, &[256], vec![0; 176]);
    assert_eq!(
        written(&writer).unwrap_err().to_string(),
        "m.gguf: tensor w has type Q5_K (13), which is not supported"
    );
    writer.raw_tensor("w", 0, &[64], vec![0; 8]);
    let message = written(&writer).unwrap_err().to_string();
    assert!(message.contains("tensor w (256 bytes at offset 0) ends outside the file of"), "{message}");
    writer.raw_tensor("w", 8, &[33], vec![0; 64]);
    assert!(written(&writer).unwrap_err().to_string().contains("rows of 33 are no multiple of 32, the block of Q8_0"));
    writer.raw_tensor("w", 0, &[usize::MAX, usize::MAX], vec![]);
    assert!(written(&writer).unwrap_err().to_string().contains("overflows"));
    writer.raw_tensor("w", 0, &[1, 1, 1, 1, 1], vec![0; 4]);
    assert!(written(&writer).unwrap_err().to_string().contains("5 dimensions, at most 4"));
}

#[test]
fn keys_and_tensors_stand_once() {
    let (bytes, _) = GgufWriter::default().set("a", Value::U8(1)).set("b", Value::U8(1)).to_bytes();
    let twice: Vec<u8> = bytes.iter().map(|&byte| if byte == b'b' { b'a' } else { byte }).collect();
    assert_eq!(refusal(twice), "m.gguf: metadata key a is malformed (it stands twice)");
}

#[test]
fn arrays_nest_to_a_limit() {
    let nested = |depth| (0..depth).fold(Array::U8(vec![1]), |inner, _| Array::Array(vec![inner]));
    let mut writer = GgufWriter::default();
    assert!(written(writer.set("k", Value::Array(nested(3)))).is_ok());
    let refused = written(writer.set("k", Value::Array(nested(4)))).unwrap_err().to_string();
    assert_eq!(refused, "m.gguf: metadata key k is malformed (arrays nest deeper than 4)");
}
