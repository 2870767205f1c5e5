//! Names of attributes that telemetry itself sets, from OpenTelemetry's semantic conventions. What a request's span says is
//! the API's to name.

pub const SERVICE_NAME: &str = "service.name";
pub const SERVICE_INSTANCE_ID: &str = "service.instance.id";
pub const SERVICE_VERSION: &str = "service.version";
pub const ERROR_TYPE: &str = "error.type";
