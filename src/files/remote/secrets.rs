//! What must not be in a message: credentials of the environment, and what signs an address.

use std::io;
use std::sync::Mutex;

use super::lock;
use crate::error::redact;

/// Tokens that were found elsewhere than in the environment.
static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Variables whose values are secrets, by what their names hold.
const SECRET: [&str; 6] = ["TOKEN", "SECRET", "PASSWORD", "ACCESS_KEY", "SAS", "ACCOUNT_KEY"];
/// Variables that begin with these belong to places.
const PLACES: [&str; 5] = ["HF_", "HUGGING_FACE_", "AWS_", "AZURE_", "GOOGLE_"];

/// Remembers a secret.
pub(super) fn keep(secret: &str) {
    let mut told = lock(&TOLD);
    if !told.iter().any(|other| other == secret) {
        told.push(secret.to_owned());
    }
}

/// An error without secrets.
pub(super) fn without(error: io::Error) -> io::Error {
    let text = error.to_string();
    let clean = clean(&text, &all());
    if clean == text && error.get_ref().is_none_or(|inner| inner.source().is_none()) { error } else { io::Error::new(error.kind(), clean) }
}

fn all() -> Vec<String> {
    let secret = |name: &str| PLACES.iter().any(|place| name.starts_with(place)) && SECRET.iter().any(|part| name.contains(part));
    let found = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    // What is short is in many words.
    found.filter(|(name, _)| secret(name)).map(|(_, value)| value).chain(lock(&TOLD).iter().cloned()).filter(|secret| secret.len() >= 6).collect()
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
        keep("a secret of a file");
        assert_eq!(without(io::Error::other("it is a secret of a file.")).to_string(), "it is ***.");
    }
}
