//! Checks of names and settings before they reach `object_store`, which panics if a request built from them
//! is invalid.

use std::io;

use serde_json::Value;
use ureq::http::Uri;
use url::Url;

/// Position of a setting in requests, which determines the permitted characters.
#[derive(Debug, Clone, Copy)]
pub(super) enum Role {
    /// The URL of a server.
    Address,
    /// The URL of a server, unless this other variable is set.
    AddressUnless(&'static str),
    /// The URL of a service for credentials, which is not used if it is empty.
    Service,
    /// Part of a host name or a path.
    Name,
    /// A header.
    Header,
}

/// Environment variables with their roles.
pub(super) type Variables = &'static [(&'static str, Role)];

pub(super) const S3: Variables = &[
    ("AWS_ENDPOINT_URL", Role::AddressUnless("AWS_ENDPOINT_URL_S3")),
    ("AWS_ENDPOINT", Role::AddressUnless("AWS_ENDPOINT_URL_S3")),
    ("AWS_ENDPOINT_URL_S3", Role::Address),
    ("AWS_ENDPOINT_URL_STS", Role::Service),
    ("AWS_METADATA_ENDPOINT", Role::Service),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", Role::Service),
    ("AWS_REGION", Role::Name),
    ("AWS_DEFAULT_REGION", Role::Name),
    ("AWS_ACCESS_KEY_ID", Role::Header),
    ("AWS_SESSION_TOKEN", Role::Header),
    ("AWS_TOKEN", Role::Header),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", Role::Header),
];
pub(super) const GS: Variables = &[("GOOGLE_BASE_URL", Role::Address), ("GOOGLE_BEARER_TOKEN", Role::Header)];
pub(super) const AZ: Variables = &[
    ("AZURE_STORAGE_ENDPOINT", Role::Address),
    ("AZURE_ENDPOINT", Role::Address),
    ("AZURE_STORAGE_AUTHORITY_HOST", Role::Service),
    ("AZURE_AUTHORITY_HOST", Role::Service),
    ("AZURE_IDENTITY_ENDPOINT", Role::Service),
    ("AZURE_MSI_ENDPOINT", Role::Service),
    ("IDENTITY_ENDPOINT", Role::Service),
    ("AZURE_FABRIC_TOKEN_SERVICE_URL", Role::Service),
    ("AZURE_STORAGE_ACCOUNT_NAME", Role::Name),
    ("AZURE_STORAGE_TENANT_ID", Role::Name),
    ("AZURE_STORAGE_AUTHORITY_ID", Role::Name),
    ("AZURE_TENANT_ID", Role::Name),
    ("AZURE_AUTHORITY_ID", Role::Name),
    ("AZURE_STORAGE_TOKEN", Role::Header),
];

/// Whether a text can be the name of a bucket or a container.
pub(super) fn is_name(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.$".contains(c))
}

/// Whether a text is the URL of a server.
fn is_address(text: &str) -> bool {
    let is_http = |url: Url| ["http", "https"].contains(&url.scheme()) && url.has_host();
    Url::parse(text).is_ok_and(is_http) && text.parse::<Uri>().is_ok()
}

/// Checks the environment variables of a store. The error does not contain their values.
pub(super) fn check(variables: Variables, value: impl Fn(&str) -> Option<String>) -> io::Result<()> {
    for (name, role) in variables {
        let Some(text) = value(name) else { continue };
        match role {
            Role::Service if text.is_empty() => {}
            Role::AddressUnless(other) if value(other).is_some() => {}
            Role::Address | Role::AddressUnless(_) | Role::Service => require_address(name, &text)?,
            Role::Name if !is_name(&text) => return Err(invalid(name, "contains other characters than letters, digits, `-`, `_`, `.` and `$`")),
            Role::Header if !text.chars().all(|c| c.is_ascii_graphic()) => {
                return Err(invalid(name, "contains a space, a line break, or a character that is not ASCII"));
            }
            Role::Name | Role::Header => {}
        }
    }
    Ok(())
}

/// Checks the address in the key of a Google service account. Other mistakes are left to `object_store`.
pub(super) fn check_account(key: &str) -> io::Result<()> {
    const ADDRESS: &str = "gcs_base_url";
    let key: Value = serde_json::from_str(key).unwrap_or_default();
    key.get(ADDRESS).and_then(Value::as_str).map_or(Ok(()), |url| require_address(&format!("`{ADDRESS}` of the service account"), url))
}

fn require_address(name: &str, value: &str) -> io::Result<()> {
    if is_address(value) { Ok(()) } else { Err(invalid(name, "is not an address like https://host or http://host:port")) }
}

fn invalid(name: &str, reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{name} {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values with which `object_store` panics.
    #[test]
    fn invalid_settings_are_named() {
        let refused = |variables: Variables, name: &str, value: &str| {
            let error = check(variables, |other| (other == name).then(|| value.to_owned())).err().map(|error| error.to_string());
            error.inspect(|error| assert!(error.starts_with(&format!("{name} ")) && !error.contains("secret"), "{error}")).is_some()
        };
        for address in ["", "minio.local:9000", "secret", "https://", "ftp://host", "http://host:99999", "http://a b", "http://300.1.1.1", "http://host\n"] {
            assert!(refused(S3, "AWS_ENDPOINT_URL", address) && refused(AZ, "AZURE_STORAGE_ENDPOINT", address), "{address}");
        }
        for address in ["http://127.0.0.1:9000", "https://s3.example.com/path", "http://[::1]:9000", "https://a-b.example/"] {
            assert!(!refused(S3, "AWS_ENDPOINT_URL", address), "{address}");
        }
        for (variables, name) in [(S3, "AWS_SESSION_TOKEN"), (S3, "AWS_ACCESS_KEY_ID"), (S3, "AWS_REGION"), (AZ, "AZURE_STORAGE_ACCOUNT_NAME")] {
            assert!(refused(variables, name, "secret\n") && refused(variables, name, "secr\u{e9}t") && !refused(variables, name, "eu-west-1"), "{name}");
        }
        // Settings that requests do not contain, or that are replaced by others.
        assert!(
            !refused(S3, "AWS_SECRET_ACCESS_KEY", "a b+/\u{e9}=") && !refused(S3, "AWS_METADATA_ENDPOINT", "") && refused(S3, "AWS_METADATA_ENDPOINT", "a")
        );
        assert!(check(S3, |name| Some(if name == "AWS_ENDPOINT_URL_S3" { "http://host" } else { "" }.to_owned())).is_ok());
        assert!(!refused(S3, "AWS_ROLE_SESSION_NAME", "a b"));
        assert!(check_account(r#"{"gcs_base_url": "localhost:1"}"#).is_err());
        for key in ["", "[]", "{}", r#"{"gcs_base_url": "http://localhost:1"}"#] {
            assert!(check_account(key).is_ok(), "{key}");
        }
    }
}
