//! Requests to the Hub about a repository that is written, with a token.

use std::io;

use serde_json::{Value, json};
use ureq::http::Method;

use super::failure::{Backoff, transient};
use super::http::{self, Address};
use super::send::{Call, Content, Reply, message};
use super::{hub, secrets};
use crate::files::hub_name::{Repository, parse};
use crate::files::require_no_secret;

/// A branch of a repository, with the token to write it.
pub(super) struct Api {
    pub endpoint: String,
    pub repository: Repository,
    pub token: String,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Api").field(&self.endpoint).field(&self.repository).finish()
    }
}

/// Adds advice to an error of a request that writes.
pub(super) fn with_advice(error: io::Error) -> io::Error {
    let advice = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "the token in HF_TOKEN or from `hf auth login` needs write access to the repository (scope `repo.write` of fine-grained tokens)"
        }
        io::ErrorKind::NotFound => "check organization, name and branch",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{error}; {advice}"))
}

/// Role of the token of a user: `read`, `write` or `fineGrained`.
fn role(user: &Value) -> Option<&str> {
    user.pointer("/auth/accessToken/role")?.as_str()
}

impl Api {
    /// Access to the repository and branch of a name like `hf:org/name@branch`.
    pub fn new(name: &str) -> io::Result<Api> {
        require_no_secret(name)?;
        let wrong = |reason: String| io::Error::new(io::ErrorKind::InvalidInput, reason);
        let (repository, inside) = parse(name).map_err(wrong)?;
        if !inside.is_empty() {
            return Err(wrong("is a path in a repository, but an output is a whole repository: specify hf:org/name or hf:org/name@branch".into()));
        }
        if hub::is_enabled("HF_HUB_OFFLINE") {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "HF_HUB_OFFLINE is set, so nothing can be uploaded"));
        }
        let missing = || io::Error::new(io::ErrorKind::PermissionDenied, "a token with write access is required: set HF_TOKEN, or run `hf auth login`");
        Ok(Api { endpoint: hub::endpoint()?, repository, token: hub::token().ok_or_else(missing)? })
    }

    /// The branch in the form that addresses require.
    pub fn branch(&self) -> String {
        hub::percent_encode(&self.repository.revision, "")
    }

    /// The address of an API of the repository.
    pub fn model_url(&self, path: &str) -> String {
        format!("{}/api/models/{}{path}", self.endpoint, self.repository.id)
    }

    /// The token, if an address is on the Hub itself.
    pub fn token_for(&self, url: &str) -> Option<&str> {
        (http::origin(url) == http::origin(&self.endpoint)).then_some(self.token.as_str())
    }

    /// Downloads a small file.
    pub fn download(&self, url: String) -> io::Result<Vec<u8>> {
        Address::new(url, Some(self.token.clone())).read_all(hub::MAX_RESPONSE).map(|received| received.bytes)
    }

    fn get(&self, url: String) -> io::Result<Value> {
        hub::json(&self.download(url).map_err(with_advice)?)
    }

    /// A request with a body, which is not sent yet.
    pub fn call<'c>(&'c self, url: &'c str, headers: &'c [(&'c str, &'c str)], body: &'c [u8], accepted: &'c [u16]) -> Call<'c> {
        Call { method: Method::POST, url, token: self.token_for(url), headers, content: Content::Bytes(body), accepted }
    }

    /// Sends a request in JSON.
    pub fn post(&self, url: &str, kind: &str, body: &Value, accepted: &[u16]) -> io::Result<Reply> {
        let body = body.to_string();
        self.call(url, &[("Content-Type", kind), ("Accept", kind)], body.as_bytes(), accepted).send().map_err(with_advice)
    }

    /// As [`post`](Api::post), for the API of models. Returns the response.
    pub fn post_model(&self, path: &str, body: &Value) -> io::Result<Value> {
        hub::json(&self.post(&self.model_url(path), "application/json", body, &[])?.bytes)
    }

    /// Checks as far as possible, before any work, that the branch can be written. Returns whether the
    /// repository exists.
    pub fn check(&self) -> io::Result<bool> {
        let user = self.get(format!("{}/api/whoami-v2", self.endpoint))?;
        if role(&user) == Some("read") {
            let reason = "the token in HF_TOKEN or from `hf auth login` can only read; create one with write access in the settings of the Hub";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        let revision = &self.repository.revision;
        let refs = match self.get(self.model_url("/refs")) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return self.check_new(&user).map(|()| false),
            refs => refs?,
        };
        let is_named = |entry: &Value| entry.get("name").and_then(Value::as_str) == Some(revision);
        let branches = refs.get("branches").and_then(Value::as_array);
        if revision.starts_with("refs/pr/") || branches.is_some_and(|branches| branches.iter().any(is_named)) {
            return Ok(true);
        }
        let reason = format!("the repository has no branch `{revision}`; create it on the page of the repository, or choose another one");
        Err(io::Error::new(io::ErrorKind::InvalidInput, reason))
    }

    /// Checks that a missing repository can be created.
    fn check_new(&self, user: &Value) -> io::Result<()> {
        let Repository { id, revision } = &self.repository;
        if revision != "main" {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("the repository does not exist, so it has no branch `{revision}`")));
        }
        let named = |value: &Value| value.get("name").and_then(Value::as_str).map(str::to_ascii_lowercase);
        let organizations = user.get("orgs").and_then(Value::as_array).into_iter().flatten();
        let known: Vec<String> = organizations.chain([user]).filter_map(named).collect();
        let owner = id.split('/').next().unwrap_or_default();
        // Fine-grained tokens may not list all organizations in which they can create repositories.
        if role(user) != Some("write") || known.contains(&owner.to_ascii_lowercase()) {
            return Ok(());
        }
        let reason = format!("the repository does not exist, and the user of the token is not a member of `{owner}` (but of {})", known.join(", "));
        Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
    }

    /// Creates the repository, which only its owner sees. Does nothing if another process has just created
    /// it.
    pub fn create(&self) -> io::Result<()> {
        let (owner, name) = self.repository.id.split_once('/').unwrap_or_default();
        let body = json!({ "type": "model", "name": name, "organization": owner, "visibility": "private" });
        let (url, mut backoff) = (format!("{}/api/repos/create", self.endpoint), Backoff::new());
        loop {
            let reply = self.post(&url, "application/json", &body, &[409])?;
            if reply.status != 409 {
                break;
            }
            // The Hub creates only one repository of a user at a time.
            let busy = message(&reply.bytes).filter(|text| text.contains("conflicting operation"));
            let Some(text) = busy else { return Ok(()) };
            backoff.pause(transient(format!("the Hub does not create the repository: {text}")))?;
        }
        let about = self.get(self.model_url(""))?;
        if about.get("private").and_then(Value::as_bool) != Some(true) {
            return Err(io::Error::other("the Hub created a repository that is not private, so nothing was uploaded; change its visibility, then start again"));
        }
        Ok(())
    }

    /// The current commit of the branch.
    pub fn head(&self) -> io::Result<String> {
        let about = self.get(self.model_url(&format!("/revision/{}", self.branch())))?;
        let sha = about.get("sha").and_then(Value::as_str).map(str::to_owned);
        sha.ok_or_else(|| secrets::redact_error(io::Error::new(io::ErrorKind::InvalidData, "the Hub does not report the commit of the branch")))
    }
}
