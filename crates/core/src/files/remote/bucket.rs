//! Object stores: `s3://bucket/key`, `gs://bucket/key`, `az://container/key`, through the crate
//! `object_store`. Credentials come from its environment variables (`AWS_*`, `GOOGLE_*`, `AZURE_*`) or
//! the machine's role.
//!
//! The crate is asynchronous. Its requests use the blocking connections of `http.rs`, and each thread
//! drives its own requests, without background threads. These connections limit the size of responses,
//! check ranges and reject unencrypted addresses. The client of `object_store` would need 30 more crates.

use std::fmt;
use std::future::Future;
use std::io::{self, Read};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::{HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientConfigKey, ClientOptions, Error, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig,
};
use ureq::http::{HeaderValue, Method, Response, StatusCode};

use super::settings::{self, is_name};
use super::{Backend, Found, MAX_FILES, Writable, http, invalid, secrets};

/// Maximum number of bytes preallocated for a response.
const MAX_PREALLOCATION: usize = 16 << 20;
/// Maximum size of an error response to a range request, in bytes.
const MAX_ERROR_RESPONSE: u64 = 64 << 10;
/// Maximum size of a response that is not a file, such as a listing or an error, in bytes.
const MAX_RESPONSE: u64 = 64 << 20;
/// Maximum number of pages of a listing, with at least one page per folder.
const MAX_PAGES: usize = 2000;

/// Hosts that provide the credentials of a machine in a cloud.
const METADATA_SERVICES: [&str; 3] = ["http://169.254.169.254", "http://169.254.170.2", "http://metadata.google.internal"];

/// An object store with multipart uploads and listings in pages.
pub(super) trait Store: ObjectStore + MultipartStore + PaginatedListStore {}
impl<T: ObjectStore + MultipartStore + PaginatedListStore> Store for T {}

pub(super) fn s3(name: &str) -> io::Result<super::Address> {
    address(name, "s3://", settings::S3, |bucket| {
        let mut builder = AmazonS3Builder::from_env();
        // Stores verify the checksum of every part.
        if builder.get_config_value(&AmazonS3ConfigKey::Checksum).is_none() {
            builder = builder.with_checksum_algorithm(Checksum::SHA256);
        }
        build_s3(builder.with_bucket_name(bucket), retries()).map_err(store_error)
    })
}

/// Builds an S3-compatible store.
pub(super) fn build_s3(builder: AmazonS3Builder, retries: RetryConfig) -> object_store::Result<Arc<dyn Store>> {
    let built = builder.with_http_connector(Connector).with_retry(retries).build();
    built.map(|store| Arc::new(store) as Arc<dyn Store>)
}

pub(super) fn gs(name: &str) -> io::Result<super::Address> {
    address(name, "gs://", settings::GS, |bucket| {
        let builder = GoogleCloudStorageBuilder::from_env();
        let file = || std::fs::read_to_string(builder.get_config_value(&GoogleConfigKey::ServiceAccount)?).ok();
        // The variable replaces the address in the key.
        let key = builder.get_config_value(&GoogleConfigKey::ServiceAccountKey).or_else(file);
        if let Some(key) = key.filter(|_| std::env::var_os("GOOGLE_BASE_URL").is_none()) {
            settings::check_account(&key)?;
        }
        let built = builder.with_bucket_name(bucket).with_http_connector(Connector).with_retry(retries()).build();
        built.map(|store| Arc::new(store) as Arc<dyn Store>).map_err(store_error)
    })
}

pub(super) fn az(name: &str) -> io::Result<super::Address> {
    address(name, "az://", settings::AZ, |bucket| {
        let built = MicrosoftAzureBuilder::from_env().with_container_name(bucket).with_http_connector(Connector).with_retry(retries()).build();
        built.map(|store| Arc::new(store) as Arc<dyn Store>).map_err(store_error)
    })
}

fn address(name: &str, scheme: &str, variables: settings::Variables, build: fn(&str) -> io::Result<Arc<dyn Store>>) -> io::Result<super::Address> {
    let rest = name.strip_prefix(scheme).unwrap_or_default();
    let (bucket, inside) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() || !is_name(bucket) {
        let reason = format!("is not of the form {scheme}bucket/key: the name of a bucket consists of letters, digits, `-`, `_`, `.` and `$`");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    let (root, bucket) = (format!("{scheme}{bucket}"), bucket.to_owned());
    let open = move || {
        settings::check(variables, |name| std::env::var(name).ok())?;
        Ok(Box::new(Bucket { store: build(&bucket)? }) as Box<dyn Backend>)
    };
    Ok(super::Address { root, inside: inside.trim_matches('/').to_owned(), open: Box::new(open) })
}

fn retries() -> RetryConfig {
    let backoff = BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: Duration::from_secs(5), base: 2.0 };
    RetryConfig { backoff, max_retries: 6, retry_timeout: Duration::from_secs(90) }
}

/// A bucket of an object store.
pub(super) struct Bucket {
    pub store: Arc<dyn Store>,
}

impl Backend for Bucket {
    fn list(&self, folder: &str) -> io::Result<Vec<Found>> {
        let (mut pages, mut files) = (vec![(path(folder)?, None)], Vec::new());
        for _ in 0..MAX_PAGES {
            let Some((folder, page_token)) = pages.pop() else { return Ok(files) };
            let prefix = (!folder.as_ref().is_empty()).then(|| format!("{folder}/"));
            let options = PaginatedListOptions { delimiter: Some("/".into()), page_token, ..PaginatedListOptions::default() };
            // A missing folder is listed as an empty folder.
            let page = wait(self.store.list_paginated(prefix.as_deref(), options))?.map_err(store_error).map_err(|e| match e.kind() {
                io::ErrorKind::NotFound => io::Error::other(format!("the bucket does not exist ({e})")),
                _ => e,
            })?;
            let listing = page.result;
            // A key that starts with `/` yields its own prefix again.
            let inner = listing.common_prefixes.into_iter().filter(|inner| inner.as_ref().len() > folder.as_ref().len());
            pages.extend(inner.map(|inner| (inner, None)));
            // Web consoles mark folders with empty objects without a name.
            for object in listing.objects.into_iter().filter(|object| object.location != folder && !object.location.as_ref().is_empty()) {
                files.push(found(object)?);
            }
            if files.len() > MAX_FILES {
                return Ok(files);
            }
            // Some stores send an empty token with the last page.
            pages.extend(page.page_token.filter(|token| !token.is_empty()).map(|token| (folder, Some(token))));
        }
        Err(io::Error::other(format!("the listing has more than {MAX_PAGES} pages; specify the folder of the model")))
    }

    fn find(&self, name: &str) -> io::Result<Option<Found>> {
        let options = GetOptions { head: true, ..GetOptions::default() };
        match wait(self.store.get_opts(&path(name)?, options))? {
            Ok(response) => found(response.meta).map(Some),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(store_error(e)),
        }
    }

    fn read(&self, file: &Found, range: Range<u64>) -> io::Result<Vec<u8>> {
        let options = GetOptions { range: Some(range.into()), if_match: file.version.clone(), ..GetOptions::default() };
        let location = path(&file.name)?;
        let response = wait(async { self.store.get_opts(&location, options).await?.bytes().await })?;
        response.map(Vec::from).map_err(store_error)
    }

    fn writable(&self) -> io::Result<&dyn Writable> {
        Ok(self)
    }
}

impl Writable for Bucket {
    fn put(&self, name: &str, bytes: Vec<u8>, new: bool) -> io::Result<Option<String>> {
        let options = PutOptions::from(if new { PutMode::Create } else { PutMode::Overwrite });
        wait(self.store.put_opts(&path(name)?, bytes.into(), options))?.map(|put| put.e_tag).map_err(store_error)
    }

    fn begin(&self, name: &str) -> io::Result<String> {
        wait(self.store.create_multipart(&path(name)?))?.map_err(store_error)
    }

    fn put_part(&self, name: &str, upload: &str, number: usize, bytes: Vec<u8>) -> io::Result<String> {
        let sent = wait(self.store.put_part(&path(name)?, &upload.to_owned(), number, bytes.into()))?;
        sent.map(|part| part.content_id).map_err(store_error)
    }

    fn complete(&self, name: &str, upload: &str, parts: Vec<String>) -> io::Result<Option<String>> {
        let parts = parts.into_iter().map(|content_id| PartId { content_id }).collect();
        wait(self.store.complete_multipart(&path(name)?, &upload.to_owned(), parts))?.map(|put| put.e_tag).map_err(store_error)
    }

    fn abort(&self, name: &str, upload: &str) -> io::Result<()> {
        match wait(self.store.abort_multipart(&path(name)?, &upload.to_owned()))? {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(store_error(e)),
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match wait(self.store.delete(&path(name)?))? {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(store_error(e)),
        }
    }
}

fn path(name: &str) -> io::Result<Path> {
    Path::parse(name).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e.to_string()))
}

fn found(object: ObjectMeta) -> io::Result<Found> {
    // The ETag is sent in requests for ranges.
    if object.e_tag.as_ref().is_some_and(|tag| HeaderValue::from_str(tag).is_err()) {
        return Err(invalid(format!("the store sends an invalid ETag of {}", object.location)));
    }
    Ok(Found { name: object.location.to_string(), bytes: object.size, version: object.e_tag, sha256: None, local: None })
}

/// A short error without the keys and signatures that responses of servers contain.
fn store_error(error: Error) -> io::Error {
    let kind = match &error {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
        Error::Precondition { .. } => return io::Error::other("was modified while it was read; start again"),
        Error::AlreadyExists { .. } => io::ErrorKind::AlreadyExists,
        // Includes conditional writes that the user has disabled.
        Error::NotImplemented { .. } | Error::NotSupported { .. } => io::ErrorKind::Unsupported,
        _ => io::ErrorKind::Other,
    };
    let text = error.to_string();
    // Without credentials, those of the machine are requested from the metadata service of the cloud.
    if METADATA_SERVICES.iter().any(|host| text.contains(host)) {
        return io::Error::new(io::ErrorKind::PermissionDenied, "no credentials are set, and those of the machine cannot be read");
    }
    let tag = |name: &str| text.split_once(&format!("<{name}>"))?.1.split_once(&format!("</{name}>")).map(|(inner, _)| inner.to_owned());
    // Many S3-compatible stores do not support conditional writes.
    let kind = if tag("Code").as_deref() == Some("NotImplemented") || text.contains("405 Method Not Allowed") { io::ErrorKind::Unsupported } else { kind };
    let message = match (tag("Code"), tag("Message")) {
        (Some(code), Some(message)) => format!("the store answers {code}: {message}"),
        (Some(code), None) => format!("the store answers {code}"),
        _ => text,
    };
    let message = secrets::redact_error(io::Error::new(kind, message)).to_string();
    io::Error::new(kind, message.chars().take(400).collect::<String>())
}

/// Runs a request to completion.
fn wait<T: Send>(request: impl Future<Output = T> + Send) -> io::Result<T> {
    // The runtime's timer is needed for delays between retries.
    let run = move || -> io::Result<T> { Ok(tokio::runtime::Builder::new_current_thread().enable_time().build()?.block_on(request)) };
    // A thread that already drives a runtime cannot block on another one.
    if tokio::runtime::Handle::try_current().is_err() {
        return run();
    }
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, run)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread of a request panicked")))
    })
}

/// Provides the stores with HTTP connections.
#[derive(Debug)]
struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allow_http = options.get_config_value(&ClientConfigKey::AllowHttp).is_some_and(|value| value == "true");
        Ok(HttpClient::new(Service { allow_http }))
    }
}

/// Sends requests through a blocking agent, one at a time per thread.
#[derive(Debug)]
struct Service {
    /// Whether the user, or the metadata service of the machine, permits unencrypted connections.
    allow_http: bool,
}

/// Return type of [`HttpService::call`].
type ResponseFuture<'c> = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'c>>;

impl HttpService for Service {
    fn call<'life0, 'async_trait>(&'life0 self, request: HttpRequest) -> ResponseFuture<'async_trait>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await?.to_bytes();
            if !self.allow_http {
                http::require_private(&parts.uri.to_string()).map_err(|e| HttpError::new(HttpErrorKind::Unknown, e))?;
            }
            let head = parts.method == Method::HEAD;
            let range = http::header(&parts.headers, "range").and_then(|text| text.strip_prefix("bytes=")?.split_once('-'));
            let length = range.and_then(|(first, end)| end.parse::<u64>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1));
            // Error responses may be longer than the requested range.
            let limit = length.map_or(MAX_RESPONSE, |length| length.max(MAX_ERROR_RESPONSE));
            let bare = body.is_empty() && [Method::GET, Method::HEAD, Method::DELETE].contains(&parts.method);
            let request = ureq::http::Request::from_parts(parts, ());
            let agent = http::agent();
            let answer = if bare { agent.run(request) } else { agent.run(request.map(|()| body.as_ref())) };
            let (mut parts, body) = answer.map_err(http_error)?.into_parts();
            // Retries of "not implemented" are pointless, so the status is replaced by one that is not
            // retried.
            if parts.status == StatusCode::NOT_IMPLEMENTED {
                parts.status = StatusCode::METHOD_NOT_ALLOWED;
            }
            let part = http::header(&parts.headers, "content-range").filter(|_| parts.status == StatusCode::PARTIAL_CONTENT);
            if let Some(text) = part.filter(|text| http::content_range(text).is_none()) {
                return Err(HttpError::new(HttpErrorKind::Interrupted, TextError(format!("the store sends the invalid range `{text}`"))));
            }
            // Preallocates the announced length up to a limit.
            let announced = http::header(&parts.headers, "content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
            let mut bytes = Vec::with_capacity(if head { 0 } else { announced.min(MAX_PREALLOCATION) });
            let read = body.into_with_config().limit(u64::MAX).reader().take(limit.saturating_add(1)).read_to_end(&mut bytes);
            read.map_err(|e| HttpError::new(HttpErrorKind::Interrupted, e))?;
            if bytes.len() as u64 > limit {
                return Err(HttpError::new(HttpErrorKind::Unknown, TextError(format!("the store sends more than the expected {limit} bytes"))));
            }
            Ok(Response::from_parts(parts, bytes.into()))
        })
    }
}

fn http_error(error: ureq::Error) -> HttpError {
    let kind = match &error {
        ureq::Error::Timeout(_) => HttpErrorKind::Timeout,
        ureq::Error::ConnectionFailed | ureq::Error::HostNotFound => HttpErrorKind::Connect,
        ureq::Error::Io(e) if e.kind() == io::ErrorKind::ConnectionRefused => HttpErrorKind::Connect,
        ureq::Error::Io(_) | ureq::Error::Protocol(_) => HttpErrorKind::Interrupted,
        _ => HttpErrorKind::Unknown,
    };
    HttpError::new(kind, TextError(error.to_string()))
}

/// An error that consists of a message.
#[derive(Debug)]
struct TextError(String);

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TextError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_names_and_etags_are_errors() {
        for name in ["s3://my bucket/x", "s3:///x", "s3://a@b/x", "s3://a\u{e9}/x", "s3://a:b/x"] {
            assert!(s3(name).err().unwrap().to_string().contains("is not of the form s3://bucket/key"), "{name}");
        }
        assert!(s3("s3://a.b-c_d/my key").is_ok() && az("az://$web/x").is_ok());
        let object = |tag: &str| ObjectMeta { location: Path::from("a"), last_modified: Default::default(), size: 1, e_tag: Some(tag.into()), version: None };
        assert!(found(object("\"one\"")).is_ok());
        assert!(found(object("ab\ncd")).unwrap_err().to_string().contains("an invalid ETag of a"));
    }

    #[test]
    fn missing_credentials_are_reported_as_such() {
        let failure = |text: &str| store_error(Error::Generic { store: "S3", source: text.into() });
        let missing = failure("Error performing PUT http://169.254.169.254/latest/api/token in 2 ms: 403 Forbidden");
        assert_eq!((missing.kind(), missing.to_string().starts_with("no credentials are set")), (io::ErrorKind::PermissionDenied, true));
        assert_eq!(failure("Error performing GET https://bucket.example/key: 500").kind(), io::ErrorKind::Other);
    }
}
