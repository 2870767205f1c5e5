//! Fuzz targets of what comes over the mesh's wire.

#[path = "fuzz/driver.rs"]
mod driver;
#[path = "fuzz/wire_decode.rs"]
mod wire_decode;

#[test]
fn any_bytes_are_a_control_frame_or_refused() {
    driver::fuzz("wire_control", wire_decode::control);
}

#[test]
fn any_bytes_are_cut_into_frames_or_refused() {
    driver::fuzz("wire_frames", wire_decode::frames);
}

#[test]
fn any_bytes_are_a_certificate_or_refused() {
    driver::fuzz("wire_certificate", wire_decode::certificate);
}
