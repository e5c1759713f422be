//! What each kind of node is made of: operands that fit, dimensions, attributes. None where nothing fits.

use ir::{Binary, DType, Draw, Op, Unary};

use crate::build::{Builder, Known, MOST_POINTS, given, shrink};
use crate::recipe::{DIMS, Kind};

const EINSUM: Op = Op::Einsum { scale: 1.0 };

const FLOATS: [DType; 2] = [DType::F32, DType::F64];

/// Types of which some kernels have no code; what only hands numbers on takes them.
const EVERY: [DType; 7] =
    [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64, DType::I32, DType::Bool];

fn name(of: &Known) -> String {
    of.name.clone()
}

impl Builder {
    /// The node of a kind, if there is something to make it of.
    pub fn node(&mut self, kind: Kind) -> Option<Known> {
        match kind {
            Kind::Input => {
                let dims = self.fresh_dims(3);
                Some(self.input("", dims, DType::F32))
            }
            Kind::State => {
                let dims = self.fresh_dims(3);
                Some(self.state("", dims))
            }
            Kind::Index => {
                let dims = self.fresh_dims(2);
                Some(self.input("", dims, DType::I32))
            }
            Kind::Const => {
                let dims = self.fresh_dims(2);
                let number = self.dice.below("number", 17) as f64 / 4.0 - 2.0;
                Some(self.make("", Op::Const(number), &[], given(dims, DType::F32)))
            }
            Kind::Iota => {
                let dims: Vec<String> = self.dice.names("dim", pool()).into_iter().take(1).collect();
                let dtype = if self.dice.chance("integer", 50) { DType::I32 } else { DType::F32 };
                let bound = self.points(&dims) as f64;
                Some(self.make("", Op::Iota, &[], Known { bound, grain: Some(0), ..given(dims, dtype) }))
            }
            Kind::Random => self.random(),
            Kind::Einsum => self.einsum(),
            Kind::Product => self.product(),
            Kind::Merge => self.merged_dims(),
            Kind::Split => self.split_dim(),
            Kind::Add => self.add(),
            Kind::ReduceMax => self.reduce_max(),
            Kind::Unary(f) => self.unary(f),
            Kind::Binary(f) => self.binary(f),
            Kind::Select => self.select(),
            Kind::Gather => self.gather(),
            Kind::Pick => self.pick(),
            Kind::Scatter => self.scatter(),
            Kind::Cast => self.cast(),
        }
    }

    /// Some of the dimensions that there are.
    fn fresh_dims(&self, most: usize) -> Vec<String> {
        let n = self.dice.below("dims", 4 * most + 1).div_ceil(4);
        self.dice.names("which dims", pool()).into_iter().take(n).collect()
    }

    fn chosen(&self, what: &str, of: &[Known]) -> Option<Known> {
        self.dice.pick(what, of, name)
    }

    /// What a function with a jump, or with a jump in its slope, may be applied to.
    fn steady(&self, of: Vec<Known>, jumps: bool) -> Vec<Known> {
        of.into_iter().filter(|k| k.grain.is_some() || !jumps && !self.loss).collect()
    }

    fn union(&self, of: &[&Known]) -> Vec<String> {
        let mut dims: Vec<String> = Vec::new();
        for dim in of.iter().flat_map(|k| &k.dims) {
            if !dims.contains(dim) {
                dims.push(dim.clone());
            }
        }
        dims
    }

    /// The dimensions of operands, and sometimes one that none has, in another order; none if they are too many.
    fn broadcast(&self, of: &[&Known]) -> Option<Vec<String>> {
        let mut dims = self.union(of);
        let more = self.dice.names("broadcast", pool()).into_iter().find(|d| !dims.contains(d));
        dims.extend(more.filter(|_| self.dice.chance("broadcasts", 12)));
        let fits = dims.len() <= 5 && self.points(&dims) <= MOST_POINTS;
        fits.then(|| if self.dice.chance("turned", 30) { self.dice.names("turn", dims) } else { dims })
    }

    fn einsum(&mut self) -> Option<Known> {
        let n = 1 + self.dice.below("operands", 3);
        let dtypes: &[DType] = if n == 1 { &[DType::F32, DType::F64, DType::I32] } else { &[DType::F32] };
        let mut args = self.dice.order("operand", self.of_type(dtypes), name);
        args.truncate(n);
        if args.len() > 1 && self.dice.chance("twice", 15) {
            args[1] = args[0].clone();
        }
        while self.points(&self.union(&args.iter().collect::<Vec<_>>())) > MOST_POINTS {
            args.pop();
        }
        let args: Vec<&Known> = args.iter().collect();
        let all = self.union(&args);
        let mut dims = self.dice.names("order", self.dice.some("kept", &all, 60));
        let more = self.dice.names("broadcast", pool()).into_iter().find(|d| !all.contains(d));
        let more = more.filter(|d| self.points(&[all.clone(), vec![d.clone()]].concat()) <= MOST_POINTS);
        dims.extend(more.filter(|_| self.dice.chance("broadcasts", 15)));
        dims.truncate(5);
        let first = *args.first()?;
        let summed: Vec<String> = all.into_iter().filter(|d| !dims.contains(d)).collect();
        self.einsum_of(&args, dims, self.points(&summed), first.dtype)
    }

    /// An einsum that sums so many products, scaled so that it stays small.
    fn einsum_of(
        &mut self,
        args: &[&Known],
        dims: Vec<String>,
        summed: usize,
        dtype: DType,
    ) -> Option<Known> {
        let bound = args.iter().map(|k| k.bound).product::<f64>() * summed as f64;
        let grain: Option<i32> = args.iter().map(|k| k.grain).sum();
        let like = Known { dims, bound, grain, ..given(Vec::new(), dtype) };
        if !dtype.is_float() {
            let scale = if self.dice.chance("negative", 30) { -2.0 } else { 1.0 };
            let like = Known { bound: 2.0 * bound, ..like };
            return (bound < 1e4).then(|| self.make("", Op::Einsum { scale }, args, like));
        }
        let (mut scale, bits) = shrink(bound, 4.0);
        let grain = grain.map(|g| g + bits);
        let (factor, grain) = match self.dice.below("scale", 10) {
            0..5 => (1.0, grain),
            5..8 => (-0.5, grain.map(|g| g + 1)),
            _ => (0.7, None),
        };
        scale *= factor;
        let like = Known { bound: bound * scale.abs(), grain, ..like };
        Some(self.make("", Op::Einsum { scale }, args, like))
    }

    fn product(&mut self) -> Option<Known> {
        let values: Vec<Known> =
            self.of_type(&[DType::F32]).into_iter().filter(|k| !k.dims.is_empty()).collect();
        let a = self.chosen("a", &values)?;
        let mut rest = self.dice.names("inner", a.dims.clone());
        let inner = rest.pop()?;
        let batch = self.dice.some("batch", &rest, 30);
        let column = self.dice.names("column", pool()).into_iter().find(|d| !a.dims.contains(d))?;
        let dims = self.dice.names("b dims", [batch, vec![inner.clone(), column.clone()]].concat());
        let out = self.dice.names("out dims", [rest, vec![column.clone()]].concat());
        if self.points(&out) * self.points(std::slice::from_ref(&inner)) > MOST_POINTS {
            return None;
        }
        let parameter = self.dice.chance("parameter", 70);
        let b = if parameter { self.state(".w", dims) } else { self.input(".w", dims, DType::F32) };
        self.known.push(b.clone());
        let summed = self.points(&[inner]);
        let args = if self.dice.chance("swapped", 50) { [&b, &a] } else { [&a, &b] };
        self.einsum_of(&args, out, summed, DType::F32)
    }

    fn merged_dims(&mut self) -> Option<Known> {
        let values = self.of_type(&[DType::F32, DType::I32]);
        let simple = |d: &String| DIMS.contains(&d.as_str());
        let fits = |k: &Known| k.dims.iter().filter(|d| simple(d)).count() >= 2;
        let of = self.chosen("of", &values.into_iter().filter(fits).collect::<Vec<_>>())?;
        let order = self.dice.names("order", of.dims.clone());
        let (two, rest): (Vec<String>, Vec<String>) = {
            let two: Vec<String> = order.iter().filter(|d| simple(d)).take(2).cloned().collect();
            let rest = order.into_iter().filter(|d| !two.contains(d)).collect();
            (two, rest)
        };
        let name = two.concat();
        if rest.contains(&name) {
            return None;
        }
        self.merge(&name, [two[0].clone(), two[1].clone()]);
        let at = self.dice.below("at", rest.len() + 1);
        let (mut dims, mut words) = (rest.clone(), rest);
        dims.insert(at, name);
        words.insert(at, format!("({} {})", two[0], two[1]));
        let signature = format!("{} -> {}", of.dims.join(" "), words.join(" "));
        let value = self.push(EINSUM, &[&of], &signature, of.dtype)?;
        Some(self.named("", value, Known { dims, ..of }))
    }

    fn split_dim(&mut self) -> Option<Known> {
        let fits = |k: &Known| {
            k.dims
                .iter()
                .any(|d| self.merged.get(d).is_some_and(|two| !k.dims.iter().any(|o| two.contains(o))))
        };
        let values: Vec<Known> = self.of_type(&[DType::F32, DType::I32]).into_iter().filter(fits).collect();
        let of = self.chosen("of", &values)?;
        let of_two =
            |d: &&String| self.merged.get(*d).is_some_and(|two| !of.dims.iter().any(|o| two.contains(o)));
        let dim = of.dims.iter().find(of_two)?.clone();
        let [x, y] = self.merged[&dim].clone();
        let operand: Vec<String> =
            of.dims.iter().map(|d| if *d == dim { format!("({x} {y})") } else { d.clone() }).collect();
        let rest = of.dims.iter().filter(|d| **d != dim).cloned();
        let dims = self.dice.names("order", rest.chain([x, y]).collect());
        let signature = format!("{} -> {}", operand.join(" "), dims.join(" "));
        let value = self.push(EINSUM, &[&of], &signature, of.dtype)?;
        Some(self.named("", value, Known { dims, ..of }))
    }

    fn add(&mut self) -> Option<Known> {
        let first = self.chosen("first", &self.of_type(&[DType::F32, DType::F64, DType::I32]))?;
        let mut args = self.dice.order("operand", self.of_type(&[first.dtype]), name);
        args.truncate(2 + self.dice.below("operands", 3));
        if args.len() == 1 || self.dice.chance("twice", 15) {
            args.push(args[0].clone());
        }
        args.truncate(4);
        let args: Vec<&Known> = args.iter().collect();
        let dims = self.broadcast(&args)?;
        let bound = args.iter().map(|k| k.bound).sum();
        let grain = args.iter().map(|k| k.grain).collect::<Option<Vec<i32>>>();
        let grain = grain.and_then(|g| g.into_iter().max());
        if !first.dtype.is_float() && bound > 1e4 {
            return None;
        }
        Some(self.make("", Op::Add, &args, Known { dims, bound, grain, ..first }))
    }

    fn reduce_max(&mut self) -> Option<Known> {
        let values = self.steady(self.of_type(&EVERY), false);
        let of = self.chosen("of", &values)?;
        let dims = self.dice.names("order", self.dice.some("kept", &of.dims, 50));
        Some(self.make("", Op::ReduceMax, &[&of], Known { dims, ..of.clone() }))
    }

    fn unary(&mut self, f: Unary) -> Option<Known> {
        let of = match f {
            Unary::Stop => self.of_type(&EVERY),
            Unary::Abs | Unary::Relu => self.steady(self.of_type(&FLOATS), false),
            Unary::Sign | Unary::Step => self.steady(self.of_type(&FLOATS), true),
            Unary::Exp
            | Unary::Expm1
            | Unary::Log
            | Unary::Tanh
            | Unary::Sqrt
            | Unary::Rsqrt
            | Unary::Sin
            | Unary::Cos
            | Unary::Sigmoid => self.of_type(&FLOATS),
        };
        let mut of = self.chosen("of", &of)?;
        let (bound, grain) = match f {
            Unary::Stop | Unary::Abs | Unary::Relu => (of.bound, of.grain),
            Unary::Sign | Unary::Step => (1.0, Some(0)),
            Unary::Tanh | Unary::Sin | Unary::Cos | Unary::Sigmoid => (1.0, None),
            Unary::Exp | Unary::Expm1 => {
                of = self.scaled(".near", &of, 1.5);
                (4.5, None)
            }
            Unary::Log | Unary::Sqrt | Unary::Rsqrt => {
                of = self.positive(&of);
                (2.5, None)
            }
        };
        let dims = if self.dice.chance("turned", 15) {
            self.dice.names("turn", of.dims.clone())
        } else {
            of.dims.clone()
        };
        Some(self.make("", Op::Unary(f), &[&of], Known { dims, bound, grain, ..of.clone() }))
    }

    /// Numbers of any indices, in the order of the result or another.
    fn random(&mut self) -> Option<Known> {
        let zero = self.make(".zero", Op::Const(0.0), &[], given(Vec::new(), DType::I32));
        let mut args = self.dice.order("operand", self.of_type(&[DType::I32]), name);
        args.truncate(self.dice.below("operands", 4));
        args.extend(std::iter::repeat_n(zero, 3 - args.len()));
        let args: Vec<&Known> = args.iter().collect();
        let all = self.union(&args);
        let more = self.dice.some("inner", &pool(), 30).into_iter().filter(|d| !all.contains(d));
        let dims = self.dice.names("order", all.iter().cloned().chain(more).collect());
        if dims.len() > 5 || self.points(&dims) > MOST_POINTS {
            return None;
        }
        // Of two ops with one name it matters that they draw the same.
        let draw = Draw { name: format!("draw{}", self.dice.below("name", 2)).into(), seed: 5 };
        let like = Known { bound: 1.0, grain: Some(24), ..given(dims, DType::F32) };
        Some(self.make("", Op::Random(draw), &args, like))
    }

    /// A square and a half: away from the pole.
    fn positive(&mut self, of: &Known) -> Known {
        let (scale, bits) = shrink(of.bound * of.bound, 4.0);
        let grain = of.grain.map(|g| 2 * g + bits);
        let like = Known { bound: of.bound * of.bound * scale, grain, ..of.clone() };
        let square = self.make(".square", Op::Einsum { scale }, &[of, of], like);
        let half = self.make(".half", Op::Const(0.5), &[], given(Vec::new(), of.dtype));
        let like = Known { bound: square.bound + 0.5, ..square.clone() };
        self.make(".positive", Op::Add, &[&square, &half], like)
    }

    fn binary(&mut self, f: Binary) -> Option<Known> {
        let values = match f {
            Binary::Sub => self.of_type(&[DType::F32, DType::F64, DType::I32]),
            Binary::Div => self.of_type(&FLOATS),
            Binary::Max | Binary::Min => self.steady(self.of_type(&EVERY), false),
            Binary::Eq | Binary::Ge => self.steady(self.of_type(&EVERY), true),
        };
        let x = self.chosen("x", &values)?;
        let alike: Vec<Known> = values.into_iter().filter(|k| k.dtype == x.dtype).collect();
        let mut y = self.chosen("y", &alike)?;
        let dims = self.broadcast(&[&x, &y])?;
        if f == Binary::Div {
            y = self.positive(&y);
        }
        let larger = x.bound.max(y.bound);
        let finer = x.grain.zip(y.grain).map(|(a, b)| a.max(b));
        let (bound, grain, dtype) = match f {
            Binary::Sub => (x.bound + y.bound, finer, x.dtype),
            Binary::Div => (2.0 * x.bound, None, x.dtype),
            Binary::Max | Binary::Min => (larger, finer, x.dtype),
            Binary::Eq | Binary::Ge => (1.0, Some(0), DType::Bool),
        };
        Some(self.make("", Op::Binary(f), &[&x, &y], Known { dims, bound, grain, dtype, ..x.clone() }))
    }

    fn select(&mut self) -> Option<Known> {
        let condition = match self.chosen("condition", &self.of_type(&[DType::Bool])) {
            Some(known) => known,
            None => {
                let zero = self.make(".zero", Op::Const(0.0), &[], given(Vec::new(), DType::F32));
                let values = self.steady(self.of_type(&[DType::F32]), true);
                let x = self.chosen("compared", &values)?;
                let truth = Known { dtype: DType::Bool, bound: 1.0, grain: Some(0), ..x.clone() };
                self.make(".condition", Op::Binary(Binary::Ge), &[&x, &zero], truth)
            }
        };
        let x = self.chosen("x", &self.of_type(&EVERY))?;
        let y = self.chosen("y", &self.of_type(&[x.dtype]))?;
        let args = [&condition, &x, &y];
        let dims = self.broadcast(&args)?;
        let grain = x.grain.zip(y.grain).map(|(a, b)| a.max(b));
        Some(self.make(
            "",
            Op::Select,
            &args,
            Known { dims, bound: x.bound.max(y.bound), grain, ..x.clone() },
        ))
    }

    /// A table with a dimension to look up.
    fn table(&self) -> Option<(Known, String)> {
        let types = [DType::F32, DType::BF16, DType::F16, DType::I64, DType::I32, DType::Bool];
        let tables: Vec<Known> = self.of_type(&types).into_iter().filter(|k| !k.dims.is_empty()).collect();
        let table = self.chosen("table", &tables)?;
        let looked = self.dice.names("looked up", table.dims.clone()).pop()?;
        Some((table, looked))
    }

    fn gather(&mut self) -> Option<Known> {
        let (table, looked) = self.table()?;
        let fits = |k: &Known| !k.dims.contains(&looked);
        let indices: Vec<Known> = self.of_type(&[DType::I32, DType::I64]).into_iter().filter(fits).collect();
        let index = match self.chosen("index", &indices) {
            Some(index) => index,
            None => {
                let dims = self.dice.names("index dims", pool()).into_iter().filter(|d| *d != looked);
                let dims = dims.take(self.dice.below("index rank", 3)).collect();
                self.input(".index", dims, DType::I32)
            }
        };
        self.gathered(&table, &looked, &index)
    }

    fn pick(&mut self) -> Option<Known> {
        let (table, looked) = self.table()?;
        let rest: Vec<String> = table.dims.iter().filter(|d| **d != looked).cloned().collect();
        let dims = self.dice.names("index order", self.dice.some("index dims", &rest, 80));
        let index = self.input(".index", dims, DType::I32);
        self.gathered(&table, &looked, &index)
    }

    /// What the table alone has stays; what the index has may be summed, where sums stay exact.
    fn gathered(&mut self, table: &Known, looked: &str, index: &Known) -> Option<Known> {
        let all: Vec<String> = self.union(&[table, index]).into_iter().filter(|d| d != looked).collect();
        let adds = matches!(table.dtype, DType::F32 | DType::I32);
        let stays =
            |d: &&String| !index.dims.contains(d) || !adds || self.dice.chance(&format!("stays {d}"), 85);
        let kept: Vec<String> = all.iter().filter(stays).cloned().collect();
        let summed: Vec<String> = all.iter().filter(|d| !kept.contains(d)).cloned().collect();
        let dims = self.dice.names("order", kept);
        let bound = table.bound * self.points(&summed) as f64;
        let fits = self.points(&all) * self.points(&[looked.to_string()]) <= MOST_POINTS && dims.len() <= 5;
        if !fits || !table.dtype.is_float() && bound > 1e4 {
            return None;
        }
        Some(self.make("", Op::Gather, &[table, index], Known { dims, bound, ..table.clone() }))
    }

    fn scatter(&mut self) -> Option<Known> {
        let source = self.chosen("source", &self.of_type(&[DType::F32]))?;
        let looked = self.dice.names("looked up", pool()).into_iter().find(|d| !source.dims.contains(d))?;
        let fits = |k: &Known| k.dims.iter().all(|d| source.dims.contains(d));
        // The CPU's scatter takes i32 and i64.
        let indices: Vec<Known> = self.of_type(&[DType::I32, DType::I64]).into_iter().filter(fits).collect();
        let index = match self.chosen("index", &indices).filter(|_| self.dice.chance("known index", 70)) {
            Some(index) => index,
            None => {
                let dims = self.dice.names("index order", self.dice.some("index dims", &source.dims, 70));
                self.input(".index", dims, DType::I32)
            }
        };
        let keep = if self.dice.chance("all", 30) { 100 } else { 40 };
        let kept = self.dice.some("kept", &source.dims, keep);
        let summed: Vec<String> = source.dims.iter().filter(|d| !kept.contains(d)).cloned().collect();
        let bound = source.bound * self.points(&summed) as f64;
        let dims = self.dice.names("order", [kept, vec![looked.clone()]].concat());
        if self.points(&source.dims) * self.points(&[looked]) > MOST_POINTS || dims.len() > 5 {
            return None;
        }
        Some(self.make("", Op::Scatter, &[&source, &index], Known { dims, bound, ..source.clone() }))
    }

    fn cast(&mut self) -> Option<Known> {
        let of = self.chosen("of", &self.of_type(&EVERY))?;
        let whole = of.grain == Some(0);
        // Up to here the short types hold every whole number.
        let short = whole && of.bound <= 256.0;
        let to: &[DType] = match of.dtype {
            DType::F32 if short => &[DType::F64, DType::I32, DType::I64, DType::BF16, DType::F16],
            DType::F32 if whole => &[DType::F64, DType::I32, DType::I64],
            DType::F32 => &[DType::F64],
            DType::F64 | DType::BF16 | DType::F16 => &[DType::F32],
            DType::I32 if short => &[DType::F32, DType::F64, DType::I64, DType::BF16, DType::F16],
            DType::I32 => &[DType::F32, DType::F64, DType::I64],
            DType::I64 => &[DType::F32, DType::I32],
            DType::Bool => &[DType::F32, DType::I32, DType::BF16, DType::F16],
            DType::U32 => &[],
        };
        let dtype = self.dice.pick("to", to, |t| t.to_string())?;
        Some(self.make("", Op::Cast, &[&of], Known { dtype, ..of.clone() }))
    }
}

fn pool() -> Vec<String> {
    DIMS.iter().map(ToString::to_string).collect()
}
