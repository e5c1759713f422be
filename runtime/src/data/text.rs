//! Text to token ids, by the `tokenizer.json` of a model, with no special tokens added.
//!
//! The ids are those of the whole text encoded at once. If the tokenizer is a plain byte-level BPE like that
//! of GPT-2, the text is cut into chunks that are encoded on all cores, some at a time, so that little memory
//! is needed besides the text and its ids. It is cut after a line end that stands alone, between two
//! characters that are no white space: the pattern of GPT-2 never joins such a line end with what stands
//! before or after it, so the ids are the same. With any other tokenizer the text is encoded in one piece.

use super::DataError;
use super::npy::{write_npy_u16, write_npy_u32};
use crate::files::FileError;
use std::fs;
use std::path::Path;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{ModelWrapper, Tokenizer};

/// A chunk is at least this many bytes.
const CHUNK: usize = 1 << 16;

/// This many chunks are encoded together.
const TOGETHER: usize = 64;

/// What `encode` has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// Bytes of text.
    pub bytes: usize,
    /// Token ids written.
    pub tokens: usize,
    /// Tokens that the tokenizer knows, with those added to its model.
    pub vocabulary: usize,
    /// Bits of an id in the file: 16 if the vocabulary fits, else 32.
    pub bits: u32,
}

/// Encodes the UTF-8 file `text` and writes the ids to `out`, a .npy.
pub fn encode(text: &Path, tokenizer: &Path, out: &Path) -> Result<Summary, DataError> {
    let bytes = fs::read(text).map_err(|source| FileError::Io {
        path: text.to_path_buf(),
        action: "read",
        source,
    })?;
    let string = String::from_utf8(bytes).map_err(|error| DataError::Text {
        path: text.to_path_buf(),
        byte: error.utf8_error().valid_up_to(),
    })?;
    let encoder = load(tokenizer)?;
    let ids = ids(&encoder, &string, CHUNK).map_err(|error| DataError::Tokenizer {
        path: tokenizer.to_path_buf(),
        problem: format!("cannot encode {}: {error}", text.display()),
    })?;

    let vocabulary = encoder.get_vocab_size(true);
    let narrow: Option<Vec<u16>> = ids.iter().map(|&id| u16::try_from(id).ok()).collect();
    let bits = match narrow.filter(|_| vocabulary <= 1 << 16) {
        Some(narrow) => write_npy_u16(out, &narrow).map(|()| 16)?,
        None => write_npy_u32(out, &ids).map(|()| 32)?,
    };
    Ok(Summary { bytes: string.len(), tokens: ids.len(), vocabulary, bits })
}

/// Truncation and padding are meant for batches, and would change a long text.
fn load(path: &Path) -> Result<Tokenizer, DataError> {
    let bytes = fs::read(path).map_err(|source| FileError::Io {
        path: path.to_path_buf(),
        action: "read",
        source,
    })?;
    let wrong = |error: tokenizers::Error| DataError::Tokenizer {
        path: path.to_path_buf(),
        problem: format!("is not a tokenizer: {error}"),
    };
    let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(wrong)?;
    tokenizer.with_padding(None).with_truncation(None).map_err(wrong)?;
    Ok(tokenizer)
}

fn ids(tokenizer: &Tokenizer, text: &str, chunk: usize) -> Result<Vec<u32>, tokenizers::Error> {
    let chunks = if can_be_cut(tokenizer) { chunks(text, chunk) } else { vec![text] };
    let mut ids = Vec::new();
    for together in chunks.chunks(TOGETHER) {
        for encoding in tokenizer.encode_batch_fast(together.to_vec(), false)? {
            ids.extend_from_slice(encoding.get_ids());
        }
    }
    Ok(ids)
}

/// Whether cutting at a lone line end changes nothing: no normalizer, the pattern of GPT-2, and no added
/// token that takes white space with it.
fn can_be_cut(tokenizer: &Tokenizer) -> bool {
    let pattern = matches!(
        tokenizer.get_pre_tokenizer(),
        Some(PreTokenizerWrapper::ByteLevel(level)) if level.use_regex && !level.add_prefix_space
    );
    let model = matches!(tokenizer.get_model(), ModelWrapper::BPE(_));
    let added = tokenizer
        .get_added_tokens_decoder()
        .values()
        .all(|token| !token.lstrip && !token.rstrip && !token.content.contains('\n'));
    pattern && model && added && tokenizer.get_normalizer().is_none()
}

/// The text in chunks of at least `least` bytes, except the last.
fn chunks(text: &str, least: usize) -> Vec<&str> {
    let mut chunks = Vec::new();
    let (mut start, mut from) = (0, least);
    while let Some(end) = text.as_bytes().get(from..).and_then(|rest| rest.iter().position(|&b| b == b'\n')) {
        let (before, after) = (&text[..from + end], &text[from + end + 1..]);
        let lone =
            before.ends_with(|c: char| !c.is_whitespace()) && after.starts_with(|c: char| !c.is_whitespace());
        from += end + 1;
        if lone {
            chunks.push(&text[start..from]);
            start = from;
            from += least;
        }
    }
    chunks.push(&text[start..]);
    chunks
}

#[cfg(test)]
mod tests {
    use super::super::npy::Npy;
    use super::*;
    use proptest::prelude::*;

    fn example(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/gpt").join(name)
    }

    #[test]
    fn the_example_text() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("ids.npy");
        let summary = encode(&example("text.txt"), &example("tokenizer.json"), &out).unwrap();
        assert_eq!(summary, Summary { bytes: 1_035_986, tokens: 434_339, vocabulary: 1024, bits: 16 });
        let npy = Npy::open(&out).unwrap();
        let ids: Vec<u32> = (0..npy.len()).map(|i| npy.get(i) as u32).collect();
        let text = fs::read_to_string(example("text.txt")).unwrap();
        assert!(chunks(&text, CHUNK).len() > 10);
        let tokenizer = load(&example("tokenizer.json")).unwrap();
        let whole = tokenizer.encode(text.as_str(), false).unwrap();
        assert!(whole.get_ids() == ids);
        assert!(tokenizer.decode(&ids, false).unwrap() == text);
    }

    #[test]
    fn where_text_is_cut() {
        let table: &[(&str, usize, &[&str])] = &[
            ("", 1, &[""]),
            ("a\nb\nc", 0, &["a\n", "b\n", "c"]),
            ("a\nb\nc", 2, &["a\nb\n", "c"]),
            ("a\n\nb\n c \nd\n", 0, &["a\n\nb\n c \nd\n"]),
            ("é\né\r\né\u{a0}\né", 0, &["é\n", "é\r\né\u{a0}\né"]),
        ];
        for &(text, least, expected) in table {
            assert_eq!(chunks(text, least), expected, "{text:?}");
        }
    }

    #[test]
    fn tokenizers_that_need_the_whole_text() {
        let text = fs::read_to_string(example("tokenizer.json")).unwrap();
        let table = [
            ("", "", true),
            ("\"add_prefix_space\": false", "\"add_prefix_space\": true", false),
            ("\"lstrip\": false", "\"lstrip\": true", false),
            ("\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}", false),
        ];
        for (from, to, cut) in table {
            let changed = text.replacen(from, to, 1);
            assert_eq!(can_be_cut(&Tokenizer::from_bytes(changed).unwrap()), cut, "{to}");
        }
    }

    #[test]
    fn what_cannot_be_encoded() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("latin.txt"), b"caf\xe9\n").unwrap();
        fs::write(at("bad.json"), "{\"version\": \"1.0\"}").unwrap();
        let (text, json) = (example("text.txt"), example("tokenizer.json"));
        let table = [
            (at("none.txt"), json.clone(), at("o.npy"), "none.txt: cannot read: No such file or directory"),
            (at("latin.txt"), json.clone(), at("o.npy"), "latin.txt: is not UTF-8 from byte 3 on"),
            (text.clone(), at("none.json"), at("o.npy"), "none.json: cannot read: No such file or directory"),
            (text.clone(), at("bad.json"), at("o.npy"), "bad.json: is not a tokenizer: Model missing."),
            (text, json, at("latin.txt/o.npy"), "latin.txt/o.npy: cannot write: Not a directory"),
        ];
        for (text, tokenizer, out, message) in table {
            let error = encode(&text, &tokenizer, &out).unwrap_err().to_string();
            assert!(error.starts_with(&dir.path().join(message).display().to_string()), "{error}");
            assert!(!out.exists());
        }
    }

    #[test]
    fn padding_and_truncation_do_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let (text, json, out) =
            (dir.path().join("t.txt"), dir.path().join("t.json"), dir.path().join("o.npy"));
        let cut = r#""truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}"#;
        let tokenizer = fs::read_to_string(example("tokenizer.json")).unwrap();
        fs::write(&json, tokenizer.replacen("\"truncation\": null", cut, 1)).unwrap();
        fs::write(&text, "zzzzz \u{1F600}").unwrap();
        assert_eq!(encode(&text, &json, &out).unwrap().tokens, 10);
        fs::write(&text, "").unwrap();
        assert_eq!(encode(&text, &json, &out).unwrap().tokens, 0);
    }

    /// The example's tokenizer, with merges that a wrong cut would show.
    fn with_white_merges() -> Tokenizer {
        let text = fs::read_to_string(example("tokenizer.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        // A line end, a space and a carriage return, as the byte-level alphabet writes them.
        for (id, (left, right)) in [("Ċ", "Ċ"), ("Ċ", "Ġ"), ("č", "Ċ"), ("Ġ", "Ċ")].into_iter().enumerate()
        {
            json["model"]["vocab"][format!("{left}{right}")] = (1024 + id).into();
            json["model"]["merges"].as_array_mut().unwrap().push(serde_json::json!([left, right]));
        }
        Tokenizer::from_bytes(json.to_string()).unwrap()
    }

    proptest! {
        /// Cut wherever it may be, a text has the ids of the whole.
        #[test]
        fn chunks_change_nothing(
            text in "(a|b|'s|[.]|é|日|0| |  |\n|\n|\n\n|\r|\t|\u{a0}|<\\|endoftext\\|>){0,40}",
            least in 0usize..8,
        ) {
            thread_local!(static TOKENIZER: Tokenizer = with_white_merges());
            TOKENIZER.with(|tokenizer| {
                let whole = tokenizer.encode(text.as_str(), false).unwrap();
                assert_eq!(ids(tokenizer, &text, least).unwrap(), whole.get_ids());
            });
        }
    }
}
