//! After it the backward pass computes again what it needs of the forward pass, instead of having it kept: random numbers and
//! what follows from them alone, always; and as asked all of a layer but what other layers use too (Chen et al., "Training
//! Deep Nets with Sublinear Memory Cost", section 4), or what is inside attention (Korthikanti et al., "Reducing Activation
//! Recomputation in Large Transformer Models", section 5).
//!
//! Last on whole tensors, since `simplify` would compute once what is written twice. What is computed again belongs to the
//! node that computed it first, so that both are split alike and give the same bits. The last layer's backward follows its
//! forward at once: nothing of it but random numbers is computed again. Those are the same, since their op has its name.
//!
//! ```text
//! recompute full
//! v2 = exp v1      | 0 forward              v2 = exp v1      | 0 forward
//! v5 = mul v4, v2  | 0 input           ->   v5 = exp v1      | 0 input of=v2 like=v2
//!                                           v6 = mul v4, v5  | 0 input
//! ```

use ir::graph::{Recompute, Rewrite};
use ir::{Graph, Node, Op, Part, Value};
use rustc_hash::FxHashMap;

pub(crate) fn run(graph: &mut Graph) {
    let drawn = graph.drawn();
    let mut again = match std::mem::take(&mut graph.recompute) {
        Recompute::None if !drawn.contains(&true) => return,
        Recompute::None => vec![false; graph.values.len()],
        Recompute::Selective => within_attention(graph),
        Recompute::Full => within_layers(graph),
    };
    again.iter_mut().zip(drawn).for_each(|(again, drawn)| *again |= drawn);
    let makers = graph.makers();
    let mut making =
        Making { old: graph, makers, again, new: Rewrite::of(graph), made: FxHashMap::default() };
    for node in &graph.nodes {
        making.node(node);
    }
    let (dump, new) = (graph.dump, making.new);
    *graph = Graph { dump, ..new.finish(graph) };
}

/// By value whether it is made inside attention.
fn within_attention(graph: &Graph) -> Vec<bool> {
    let inside = |n: &Node| n.tag.as_ref().is_some_and(|t| &*t.composite == "attention");
    by_value(graph, &inside)
}

/// By value whether only its own layer uses it, and it costs no lookup in a parameter.
fn within_layers(graph: &Graph) -> Vec<bool> {
    let forward = |n: &&Node| n.mark.part == Part::Forward;
    let deepest = graph.nodes.iter().filter(forward).map(|n| n.mark.layer).max().unwrap_or(0);
    let last = if graph.layers > 0 { graph.layers } else { deepest };
    let mut again = by_value(graph, &|n| n.mark.layer < last && n.op != Op::Gather);
    let makers = graph.makers();
    for node in graph.nodes.iter().filter(forward) {
        for v in &node.args {
            again[v.index()] &= graph.nodes[makers[v.index()]].mark.layer == node.mark.layer;
        }
    }
    again
}

/// By value whether it is computed in the forward pass, by a node of this kind.
fn by_value(graph: &Graph, is: &dyn Fn(&Node) -> bool) -> Vec<bool> {
    let mut all = vec![false; graph.values.len()];
    for node in graph.nodes.iter().filter(|n| n.mark.part == Part::Forward && is(n)) {
        let given = matches!(node.op, Op::Input(_) | Op::State(_) | Op::Accumulate);
        node.results.iter().for_each(|v| all[v.index()] = !given);
    }
    all
}

struct Making<'a> {
    old: &'a Graph,
    makers: Vec<usize>,
    /// By value whether the backward pass computes it again.
    again: Vec<bool>,
    new: Rewrite,
    /// By old value what is computed again.
    made: FxHashMap<Value, Value>,
}

impl Making<'_> {
    fn node(&mut self, node: &Node) {
        let backward = matches!(node.mark.part, Part::Input | Part::Weight) && node.op != Op::Accumulate;
        let args: Option<Vec<Value>> = backward.then(|| node.args.iter().map(|v| self.again(*v)).collect());
        let at = self.new.copy(self.old, node);
        if let Some(args) = args {
            self.new.graph.nodes[at].args = args;
        }
    }

    /// The new value that is the old one in the backward pass.
    fn again(&mut self, old: Value) -> Value {
        if let Some(made) = self.made.get(&old) {
            return *made;
        }
        let first = self.new.at(old);
        if !self.again[old.index()] {
            return first;
        }
        let graph = self.old;
        let node = &graph.nodes[self.makers[old.index()]];
        let args: Vec<Value> = node.args.iter().map(|v| self.again(*v)).collect();
        let kept: Vec<Option<Value>> = node.results.iter().map(|v| self.new.now[v.index()]).collect();
        let at = self.new.copy(graph, node);
        let new = &mut self.new.graph.nodes[at];
        new.args = args;
        new.mark.part = Part::Input;
        (new.of, new.like) = (Some(first), Some(first));
        // Behind it the forward pass still uses what was made first.
        for (v, first) in node.results.iter().zip(kept) {
            if let Some(made) = std::mem::replace(&mut self.new.now[v.index()], first) {
                self.made.insert(*v, made);
            }
        }
        self.made.get(&old).copied().unwrap_or(first)
    }
}
