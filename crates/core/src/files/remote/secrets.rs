//! Removes secrets from error messages: credentials of the environment and signatures in URLs.

use std::io;
use std::sync::Mutex;

use super::lock;
use crate::error::redact;

/// Tokens from sources other than the environment.
static REGISTERED: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// A variable is a secret if its name contains one of these words.
const SECRET: [&str; 6] = ["TOKEN", "SECRET", "PASSWORD", "ACCESS_KEY", "SAS", "ACCOUNT_KEY"];
/// Only variables with these prefixes are considered.
const PREFIXES: [&str; 5] = ["HF_", "HUGGING_FACE_", "AWS_", "AZURE_", "GOOGLE_"];

/// Registers a secret, so that it is removed from messages.
pub(super) fn register(secret: &str) {
    let mut registered = lock(&REGISTERED);
    if !registered.iter().any(|other| other == secret) {
        registered.push(secret.to_owned());
    }
}

/// Removes all secrets from an error.
pub(super) fn redact_error(error: io::Error) -> io::Error {
    let text = error.to_string();
    let clean = clean(&text, &all());
    if clean == text && error.get_ref().is_none_or(|inner| inner.source().is_none()) { error } else { io::Error::new(error.kind(), clean) }
}

fn all() -> Vec<String> {
    let secret = |name: &str| PREFIXES.iter().any(|prefix| name.starts_with(prefix)) && SECRET.iter().any(|part| name.contains(part));
    let found = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    // Short values are ignored, because they occur in many words.
    found.filter(|(name, _)| secret(name)).map(|(_, value)| value).chain(lock(&REGISTERED).iter().cloned()).filter(|secret| secret.len() >= 6).collect()
}

fn clean(text: &str, secrets: &[String]) -> String {
    redact(&secrets.iter().fold(text.to_owned(), |text, secret| text.replace(secret.as_str(), "***")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_secret_is_left_in_a_text() {
        let secrets = ["hf_abcdef".to_owned()];
        let text = "GET https://user:pass@cdn.example/a/b?X-Amz-Signature=77&x=1 with Bearer hf_abcdef: `https://a/?sig=1` and http://b";
        assert_eq!(clean(text, &secrets), "GET https://cdn.example/a/b with Bearer ***: `https://a/` and http://b");
        assert_eq!(clean("nothing of that kind", &secrets), "nothing of that kind");
        register("a secret of a file");
        assert_eq!(redact_error(io::Error::other("it is a secret of a file.")).to_string(), "it is ***.");
    }
}
