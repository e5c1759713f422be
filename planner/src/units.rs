//! Numbers with units, as people read them.

/// Bytes, in powers of 1024.
pub fn bytes(n: f64) -> String {
    scaled(n, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// A rate or count, in powers of 1000, with its unit.
pub fn count(n: f64, unit: &str) -> String {
    let text = scaled(n, 1000.0, &["", "k", "M", "G", "T", "P"]);
    let (number, prefix) = text.split_once(' ').unwrap_or((&text, ""));
    format!("{number} {prefix}{unit}")
}

/// Seconds.
pub fn seconds(s: f64) -> String {
    let (x, unit) = match s {
        s if s >= 100.0 => return format!("{} s", grouped(s.round() as u64)),
        s if s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (s * 1e3, "ms"),
        s => (s * 1e6, "us"),
    };
    format!("{} {unit}", short(x))
}

fn scaled(n: f64, by: f64, units: &[&str]) -> String {
    let mut x = n;
    let mut i = 0;
    while x >= by && i + 1 < units.len() {
        x /= by;
        i += 1;
    }
    if i == 0 {
        format!("{} {}", grouped(x.round() as u64), units[0])
    } else {
        format!("{} {}", short(x), units[i])
    }
}

fn short(x: f64) -> String {
    match x {
        x if x >= 100.0 => format!("{x:.0}"),
        x if x >= 10.0 => format!("{x:.1}"),
        x => format!("{x:.2}"),
    }
}

/// A whole number with commas between thousands.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// So many of something: `1 rank`, `2 ranks`.
pub fn many(n: usize, what: &str) -> String {
    let plural = match what {
        _ if n == 1 => "",
        _ if what.ends_with("batch") => "es",
        _ => "s",
    };
    format!("{} {what}{plural}", grouped(n as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_well() {
        assert_eq!(bytes(3_145_728.0), "3.00 MiB");
        assert_eq!(bytes(96.0), "96 B");
        assert_eq!(seconds(0.0123), "12.3 ms");
        assert_eq!(seconds(4.2e-6), "4.20 us");
        assert_eq!(seconds(1234.4), "1,234 s");
        assert_eq!(count(2.3e9, "FLOP"), "2.30 GFLOP");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(many(1, "rank"), "1 rank");
        assert_eq!(many(1024, "micro-batch"), "1,024 micro-batches");
    }
}
