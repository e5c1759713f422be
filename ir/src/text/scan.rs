//! Reads words, numbers and lists from a piece of text, from left to right.

/// What is left to read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scan<'a> {
    rest: &'a str,
}

impl<'a> Scan<'a> {
    pub(super) fn new(text: &'a str) -> Scan<'a> {
        Scan { rest: text.trim() }
    }

    pub(super) fn rest(&self) -> &'a str {
        self.rest
    }

    pub(super) fn done(&self) -> bool {
        self.rest.is_empty()
    }

    /// Takes `what` if it stands here.
    pub(super) fn eat(&mut self, what: &str) -> bool {
        match self.rest.strip_prefix(what) {
            Some(rest) => {
                self.rest = rest.trim_start();
                true
            }
            None => false,
        }
    }

    pub(super) fn expect(&mut self, what: &str) -> Result<(), String> {
        if self.eat(what) { Ok(()) } else { Err(format!("expected `{what}` before `{}`", self.rest)) }
    }

    /// Everything before `stop`, which is taken too.
    pub(super) fn until(&mut self, stop: &str) -> Result<&'a str, String> {
        let (before, after) =
            self.rest.split_once(stop).ok_or_else(|| format!("expected `{stop}` after `{}`", self.rest))?;
        self.rest = after.trim_start();
        Ok(before.trim())
    }

    /// A run of letters, digits and `_ . - '`.
    pub(super) fn word(&mut self) -> Result<&'a str, String> {
        let part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-' | '\'');
        let end = self.rest.find(|c| !part(c)).unwrap_or(self.rest.len());
        if end == 0 {
            return Err(format!("expected a name before `{}`", self.rest));
        }
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        Ok(word)
    }

    /// A name and the arrow behind it.
    pub(super) fn word_before_arrow(&mut self) -> Result<&'a str, String> {
        self.until("->")
    }

    pub(super) fn number<T: std::str::FromStr>(&mut self) -> Result<T, String> {
        let part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+');
        let end = self.rest.find(|c| !part(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        let number = word.parse().map_err(|_| format!("`{word}` is no number"))?;
        self.rest = rest.trim_start();
        Ok(number)
    }

    /// A whole number that ends where the digits end: `8/dp`.
    pub(super) fn number_before_slash(&mut self) -> Result<usize, String> {
        let end = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        let number = word.parse().map_err(|_| format!("`{word}` is no size"))?;
        self.rest = rest.trim_start();
        Ok(number)
    }

    /// `v7` or `b7` or `r7`: the number behind a letter.
    pub(super) fn id(&mut self, letter: &str) -> Result<usize, String> {
        self.expect(letter)?;
        self.number()
    }

    /// A quoted string, as `{:?}` writes it; without escapes but `\"` and `\\`.
    pub(super) fn quoted(&mut self) -> Result<String, String> {
        let wrong = || format!("expected a quoted name before `{}`", self.rest);
        let inner = self.rest.strip_prefix('"').ok_or_else(wrong)?;
        let mut out = String::new();
        let mut escaped = false;
        for (i, c) in inner.char_indices() {
            match c {
                c if escaped => {
                    out.push(c);
                    escaped = false;
                }
                '\\' => escaped = true,
                '"' => {
                    self.rest = inner[i + 1..].trim_start();
                    return Ok(out);
                }
                c => out.push(c),
            }
        }
        Err(wrong())
    }

    /// Items separated by commas up to `close`, which is taken too.
    pub(super) fn list<T>(
        &mut self,
        close: &str,
        mut item: impl FnMut(&mut Scan<'a>) -> Result<T, String>,
    ) -> Result<Vec<T>, String> {
        let mut out = Vec::new();
        if self.eat(close) {
            return Ok(out);
        }
        loop {
            out.push(item(self)?);
            if self.eat(close) {
                return Ok(out);
            }
            self.expect(",")?;
        }
    }
}

/// `8x32`, or `()` for a scalar.
pub(super) fn show_shape(shape: &[usize]) -> String {
    if shape.is_empty() {
        return "()".to_string();
    }
    shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

pub(super) fn parse_shape(text: &str) -> Result<Vec<usize>, String> {
    if text == "()" {
        return Ok(Vec::new());
    }
    text.split('x')
        .map(|n| n.parse().map_err(|_| format!("`{text}` is no shape: one reads 8x32, or ()")))
        .collect()
}
