//! From a recipe to a graph, a mesh and places. Of every value is known how large it can be and whether f32 holds it
//! exactly: values stay small, and what jumps (a comparison, a sign, the gradient of a largest) sees exact ones only.

use std::collections::BTreeMap;

use ir::graph::{Constraint, Loss, Mark, NewNode};
use ir::schedule::Schedule;
use ir::state::{AdamW, Init, Input, Role, State};
use planner::schedules::named;
use planner::schedules::refused::Size;

use ir::{Binary, DType, Graph, Mesh, Name, Op, Part, Places, Scope, Sharding, Signature, Value};

use crate::dice::Dice;
use crate::recipe::{DIMS, Recipe};

/// How many points a node's factors have at most: more would only cost time.
pub const MOST_POINTS: usize = 3000;

/// How large a value of floats may be before it is scaled down.
const MOST: f64 = 4.0;

/// A graph, and where it is to run.
#[derive(Clone, Debug)]
pub struct Case {
    pub graph: Graph,
    pub mesh: Mesh,
    pub places: Places,
}

/// A value, and what is known of it.
#[derive(Clone, Debug)]
pub struct Known {
    pub value: Value,
    /// The number of its node, and what it is beside that; by it the value is chosen.
    pub name: String,
    pub dims: Vec<String>,
    pub dtype: DType,
    /// The largest that it can be, without its sign.
    pub bound: f64,
    /// If it is exact in f32, it is a multiple of 2^-grain.
    pub grain: Option<i32>,
}

/// A graph being built.
pub struct Builder {
    pub graph: Graph,
    pub dice: Dice,
    /// Whether there will be a backward pass.
    pub loss: bool,
    pub known: Vec<Known>,
    /// The two dimensions that were merged to one.
    pub merged: BTreeMap<String, [String; 2]>,
    sizes: BTreeMap<String, usize>,
    /// The node that is built.
    at: String,
    part: Part,
    /// The mark of what is built.
    depth: u32,
}

/// So many depths are told apart where a graph is cut.
const DEPTH: usize = 6;

impl Builder {
    /// The case of a recipe.
    pub fn build(recipe: &Recipe) -> Case {
        let mut builder = Builder {
            graph: Graph::default(),
            dice: Dice::new(recipe.seed, ""),
            loss: recipe.loss,
            known: Vec::new(),
            merged: BTreeMap::new(),
            sizes: DIMS.iter().map(|d| d.to_string()).zip(recipe.sizes).collect(),
            at: String::new(),
            part: Part::Forward,
            depth: 0,
        };
        let deepest = recipe.nodes.last().map_or(0, |(n, _)| *n);
        for (n, kind) in &recipe.nodes {
            // Nodes with a number are at some depth, whatever is taken away.
            builder.depth = if recipe.pipeline.is_some() { (DEPTH * n / (deepest + 1)) as u32 } else { 0 };
            builder.at(recipe, &format!("n{n}"));
            let Some(made) = builder.node(*kind) else { continue };
            let made = builder.settled(made);
            if recipe.asked.contains(n) {
                builder.ask(recipe, &made);
            }
            builder.known.push(made);
        }
        builder.ends(recipe);
        let pipeline = recipe.pipeline.map(|p| ("pp", p.rows));
        let text = recipe.mesh.iter().copied().chain(pipeline).map(|(name, size)| format!("{name}={size}"));
        let mesh = Mesh::parse(&text.collect::<Vec<_>>().join(",")).unwrap_or_else(|e| panic!("{e}"));
        let mut places = Places::from(places(recipe, &builder.graph, &mesh));
        places.schedule = Schedule::one_stage(recipe.microbatches);
        if let Some(p) = recipe.pipeline {
            let size =
                Size { stages: p.rows, virtuals: p.virtuals, microbatches: recipe.microbatches, group: None };
            let table = named(p.kind).and_then(|kind| (kind.table)(&size).ok());
            places.schedule = table.unwrap_or_else(|| panic!("{} has no table of {size:?}", p.kind));
            let (depth, stages) = (builder.graph.depth(), places.schedule.stages());
            builder.graph.stages = (0..depth).map(|mark| mark * stages / depth).collect();
        }
        Case { graph: builder.graph, mesh, places }
    }

    fn at(&mut self, recipe: &Recipe, name: &str) {
        self.at = name.to_string();
        self.dice = Dice::new(recipe.seed, name);
    }

    /// How many points these dimensions have.
    pub fn points(&self, dims: &[String]) -> usize {
        dims.iter().map(|d| self.sizes[d]).product()
    }

    /// Declares a dimension that two others make up.
    pub fn merge(&mut self, name: &str, [a, b]: [String; 2]) {
        self.sizes.insert(name.to_string(), self.sizes[&a] * self.sizes[&b]);
        self.merged.insert(name.to_string(), [a, b]);
    }

    /// Values of these element types.
    pub fn of_type(&self, dtypes: &[DType]) -> Vec<Known> {
        self.known.iter().filter(|k| dtypes.contains(&k.dtype)).cloned().collect()
    }

    /// Appends a node by the text of its signature.
    pub fn push(&mut self, op: Op, args: &[&Known], signature: &str, dtype: DType) -> Option<Value> {
        let signature = Signature::parse(signature).unwrap_or_else(|e| panic!("{e}"));
        let known = self.sizes.iter().map(|(n, s)| (n.as_str().into(), *s)).collect();
        let args = args.iter().map(|k| k.value).collect();
        let mark = Mark { layer: self.depth, part: self.part };
        let new = NewNode { op, signature, args, dtype, known, mark, tag: None, of: None, like: None };
        self.graph.push(new).unwrap_or_else(|e| panic!("{}: {e}", self.at))
    }

    /// A value that a node makes of others, its dimensions named; `suffix` sets it apart from others of the node.
    pub fn make(&mut self, suffix: &str, op: Op, args: &[&Known], like: Known) -> Known {
        let text = |dims: &[String]| if dims.is_empty() { "()".to_string() } else { dims.join(" ") };
        let operands: Vec<String> = args.iter().map(|k| text(&k.dims)).collect();
        let signature = format!("{} -> {}", operands.join(", "), text(&like.dims));
        let value = self.push(op, args, &signature, like.dtype).unwrap_or(Value(u32::MAX));
        self.named(suffix, value, like)
    }

    /// The same of another value.
    pub fn named(&self, suffix: &str, value: Value, like: Known) -> Known {
        let fits = |grain: &i32| f64::from(*grain) + (like.bound + 1.0).log2() <= 20.0;
        Known { value, name: format!("{}{suffix}", self.at), grain: like.grain.filter(fits), ..like }
    }

    /// An input of floats or of indices.
    pub fn input(&mut self, suffix: &str, dims: Vec<String>, dtype: DType) -> Known {
        let name: Name = format!("{}{suffix}", self.at).into();
        self.graph.inputs.push(Input { name: name.clone(), dtype, dims: self.sized(&dims) });
        self.make(suffix, Op::Input(name), &[], given(dims, dtype))
    }

    /// A state of floats.
    pub fn state(&mut self, suffix: &str, dims: Vec<String>) -> Known {
        let name: Name = format!("{}{suffix}", self.at).into();
        let trainable = self.dice.chance(&format!("trainable{suffix}"), 70);
        let role = Role::Parameter { trainable, decays: trainable && dims.len() > 1 };
        let (dtype, init, views) = (DType::F32, Init::Ones, Vec::new());
        let sized = self.sized(&dims);
        self.graph.states.push(State { name: name.clone(), dtype, dims: sized, role, init, views });
        self.make(suffix, Op::State(name), &[], given(dims, dtype))
    }

    fn sized(&self, dims: &[String]) -> Vec<(Name, usize)> {
        dims.iter().map(|d| (d.as_str().into(), self.sizes[d])).collect()
    }

    /// The same, scaled down if it is too large.
    fn settled(&mut self, made: Known) -> Known {
        let float = matches!(made.dtype, DType::F32 | DType::F64);
        if float && made.bound > MOST { self.scaled(".small", &made, MOST) } else { made }
    }

    /// A value times a power of two so that it stays below a limit.
    pub fn scaled(&mut self, suffix: &str, of: &Known, limit: f64) -> Known {
        let (scale, bits) = shrink(of.bound, limit);
        let like = Known { bound: of.bound * scale, grain: of.grain.map(|g| g + bits), ..of.clone() };
        self.make(suffix, Op::Einsum { scale }, &[of], like)
    }

    fn ask(&mut self, recipe: &Recipe, of: &Known) {
        // An axis that the mesh lacks may be asked for.
        let axes = recipe.mesh.iter().map(|(name, _)| name.to_string()).chain(["q".to_string()]).collect();
        let mut dims: Vec<Vec<Name>> = vec![Vec::new(); of.dims.len()];
        for axis in self.dice.names("asked", axes) {
            let dim = self.dice.below(&format!("asked {axis}"), dims.len() + 1);
            dims.get_mut(dim).into_iter().for_each(|axes| axes.push(axis.as_str().into()));
        }
        self.graph.constraints.push(Constraint { value: of.value, dims, even: false });
    }

    /// Taps of what nothing uses and of some of the rest, a loss, and what becomes of states.
    fn ends(&mut self, recipe: &Recipe) {
        let used: Vec<Value> = self.graph.nodes.iter().flat_map(|n| &n.args).copied().collect();
        let ends: Vec<Known> = self.known.iter().filter(|k| !used.contains(&k.value)).cloned().collect();
        self.at(recipe, "loss");
        let mut terms: Vec<Known> = ends.iter().filter(|k| k.dtype == DType::F32).cloned().collect();
        terms = self.dice.order("terms", terms, |k| k.name.clone());
        terms.truncate(3);
        let summed = recipe.loss && !terms.is_empty();
        for k in self.known.clone() {
            let end = ends.iter().any(|e| e.value == k.value);
            let named = |name: &String| *name == k.name;
            let percent = match end {
                true if !(summed && terms.iter().map(|t| &t.name).any(named)) => 100,
                true => 50,
                false => 20,
            };
            if self.dice.chance(&format!("tap {}", k.name), percent) {
                self.push(Op::Tap(k.name.as_str().into()), &[&k], &effect(&k.dims), k.dtype);
            }
        }
        if summed {
            self.add_loss(&terms);
        }
        self.part = Part::Update;
        self.updates(recipe);
    }

    fn add_loss(&mut self, terms: &[Known]) {
        let mut sums = Vec::new();
        for (i, term) in terms.iter().enumerate() {
            let weight = self.input(&format!(".weight{i}"), term.dims.clone(), DType::F32);
            let (scale, _) = shrink(term.bound * weight.bound * self.points(&term.dims) as f64, 1.0);
            let like = Known { dims: Vec::new(), bound: 1.0, grain: None, ..term.clone() };
            sums.push(self.make("", Op::Einsum { scale }, &[term, &weight], like));
        }
        let like = sums[0].clone();
        let sum = if sums.len() == 1 {
            like
        } else {
            self.make("", Op::Add, &sums.iter().collect::<Vec<_>>(), like)
        };
        let indices = self.of_type(&[DType::I32]);
        let count = match self.dice.pick("count", &indices, |k| k.name.clone()) {
            Some(index) => {
                let zero = self.make("", Op::Const(0.0), &[], given(Vec::new(), DType::I32));
                let truth = Known { dtype: DType::Bool, ..index.clone() };
                let counts = self.make("", Op::Binary(Binary::Ge), &[&index, &zero], truth.clone());
                let ones = self.make("", Op::Cast, &[&counts], Known { dtype: DType::F32, ..truth });
                let like = Known { dims: Vec::new(), ..ones.clone() };
                self.make("", Op::Einsum { scale: 1.0 }, &[&ones], like)
            }
            None => self.make("", Op::Const(3.0), &[], given(Vec::new(), DType::F32)),
        };
        self.graph.loss = Some(Loss { sum: sum.value, count: count.value });
        let clip = self.dice.chance("clip", 50).then_some(0.5);
        let (lr, min_lr, warmup, steps) = (0.05, 0.01, self.dice.below("warmup", 6), 10);
        let (beta1, beta2, eps, weight_decay) = (0.9, 0.95, 1e-6, 0.1);
        self.graph.optimizer =
            Some(AdamW { lr, min_lr, warmup, steps, beta1, beta2, eps, weight_decay, clip });
        self.graph.dump = true;
    }

    /// Most states that the optimizer leaves alone are assigned something of their own shape.
    fn updates(&mut self, recipe: &Recipe) {
        let states: Vec<Known> = self.known.clone();
        let fixed = |g: &Graph, k: &Known| {
            let fixed = Role::Parameter { trainable: false, decays: false };
            g.state(&k.name).is_some_and(|s| s.role == fixed)
        };
        for state in states {
            self.at(recipe, &format!("next {}", state.name));
            if !fixed(&self.graph, &state) || !self.dice.chance("assigned", 80) {
                continue;
            }
            let values = self.of_type(&[DType::F32]);
            let fits = |k: &Known| {
                let rest: Vec<String> = k.dims.iter().filter(|d| !state.dims.contains(d)).cloned().collect();
                self.points(&[rest, state.dims.clone()].concat()) <= MOST_POINTS
            };
            let values: Vec<Known> = values.into_iter().filter(fits).collect();
            let Some(mut of) = self.dice.pick("of", &values, |k| k.name.clone()) else { continue };
            if self.graph.ty(of.value).scope == Scope::Micro {
                of = self.make("", Op::Accumulate, &[&of.clone()], of);
            }
            let summed = of.dims.iter().filter(|d| !state.dims.contains(d)).cloned().collect::<Vec<_>>();
            let (scale, _) = shrink(of.bound * self.points(&summed) as f64, MOST);
            let like = Known { grain: None, ..state.clone() };
            let mut new = self.make("", Op::Einsum { scale }, &[&of], like.clone());
            if self.dice.chance("added", 50) {
                new = self.make("", Op::Add, &[&state, &new], like);
            }
            let name = state.name.as_str().into();
            self.push(Op::Assign(name), &[&new], &effect(&state.dims), state.dtype);
        }
    }
}

/// The signature of what has no result.
fn effect(dims: &[String]) -> String {
    if dims.is_empty() { "() ->".to_string() } else { format!("{} ->", dims.join(" ")) }
}

/// What is known of a feed, and of an index.
pub fn given(dims: Vec<String>, dtype: DType) -> Known {
    let (bound, grain) = if dtype.is_float() { (2.0, 3) } else { (5.0, 0) };
    Known { value: Value(0), name: String::new(), dims, dtype, bound, grain: Some(grain) }
}

/// The largest power of two, at most 1, that brings a bound below a limit; and how many bits it takes.
pub fn shrink(bound: f64, limit: f64) -> (f64, i32) {
    let bits = (bound / limit).log2().ceil().max(0.0) as i32;
    (0.5f64.powi(bits), bits)
}

/// Each axis splits some dimension of each input and state, or none.
fn places(recipe: &Recipe, graph: &Graph, mesh: &Mesh) -> BTreeMap<Name, Sharding> {
    let inputs = graph.inputs.iter().map(|i| (&i.name, i.dims.len()));
    let states = graph.states.iter().map(|s| (&s.name, s.dims.len()));
    let place = |name: &Name, dims: usize| {
        let dice = Dice::new(recipe.seed, name);
        let mut sharding = Sharding::replicated(dims);
        for axis in dice.order("axes", mesh.all().collect(), |a| mesh.name(*a).to_string()) {
            let Some((axis_name, _)) = recipe.mesh.get(axis.index()).copied() else { continue };
            let dim = dice.below(&format!("place {axis_name}"), dims + 1);
            if dim < dims && !recipe.whole.contains(&(name.to_string(), axis_name)) {
                sharding.dims[dim].push(axis);
            }
        }
        sharding
    };
    inputs.chain(states).map(|(name, dims)| (name.clone(), place(name, dims))).collect()
}
