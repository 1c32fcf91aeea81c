//! Rewrites the operations of a template that create values to filters, which limit their memory and have the
//! semantics of Jinja2.

use minijinja::machinery::ast::{self, BinOpKind, CallArg, Expr, Spanned, Stmt};
use minijinja::machinery::{Span, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind, Value};

/// Filter that counts the value of an expression.
pub(super) const COUNT: &str = "{}";
/// Filter that applies the filter with the name of its first argument.
pub(super) const APPLY: &str = "|";

/// Parses and rewrites a template.
pub(super) fn parse_rewritten(text: &str, syntax: SyntaxConfig) -> Result<Stmt<'_>, Error> {
    statement(&parse(text, "<string>", syntax)?)
}

/// Name of the filter for an operator.
fn operator(kind: BinOpKind) -> Option<&'static str> {
    match kind {
        BinOpKind::Add => Some("+"),
        BinOpKind::Mul => Some("*"),
        BinOpKind::Rem => Some("%"),
        BinOpKind::Concat => Some("~"),
        _ => None,
    }
}

fn filter<'s>(name: &'static str, expr: Option<Expr<'s>>, args: Vec<CallArg<'s>>, span: Span) -> Expr<'s> {
    Expr::Filter(Spanned::new(ast::Filter { name, expr, args }, span))
}

fn constant<'s>(value: Value, span: Span) -> Expr<'s> {
    Expr::Const(Spanned::new(ast::Const { value }, span))
}

fn expressions<'s>(list: &[Expr<'s>]) -> Vec<Expr<'s>> {
    list.iter().map(expression).collect()
}

fn optional<'s>(expr: &Option<Expr<'s>>) -> Option<Expr<'s>> {
    expr.as_ref().map(expression)
}

fn arguments<'s>(args: &[CallArg<'s>]) -> Vec<CallArg<'s>> {
    let argument = |arg: &CallArg<'s>| match arg {
        CallArg::Pos(expr) => CallArg::Pos(expression(expr)),
        CallArg::Kwarg(name, expr) => CallArg::Kwarg(name, expression(expr)),
        CallArg::PosSplat(expr) => CallArg::PosSplat(expression(expr)),
        CallArg::KwargSplat(expr) => CallArg::KwargSplat(expression(expr)),
    };
    args.iter().map(argument).collect()
}

fn call<'s>(call: &Spanned<ast::Call<'s>>) -> Spanned<ast::Call<'s>> {
    Spanned::new(ast::Call { expr: expression(&call.expr), args: arguments(&call.args) }, call.span())
}

fn expression<'s>(expr: &Expr<'s>) -> Expr<'s> {
    let span = expr.span();
    let counted = |expr: Expr<'s>| filter(COUNT, Some(expr), Vec::new(), span);
    match expr {
        Expr::Var(var) => Expr::Var(Spanned::new(ast::Var { id: var.id }, span)),
        Expr::Const(stored) => constant(stored.value.clone(), span),
        Expr::Slice(slice) => {
            let [start, stop, step] = [&slice.start, &slice.stop, &slice.step].map(optional);
            counted(Expr::Slice(Spanned::new(ast::Slice { expr: expression(&slice.expr), start, stop, step }, span)))
        }
        Expr::UnaryOp(unary) => {
            let op = if matches!(unary.op, ast::UnaryOpKind::Not) { ast::UnaryOpKind::Not } else { ast::UnaryOpKind::Neg };
            Expr::UnaryOp(Spanned::new(ast::UnaryOp { op, expr: expression(&unary.expr) }, span))
        }
        Expr::BinOp(binary) => {
            let (left, right) = (expression(&binary.left), expression(&binary.right));
            match operator(binary.op) {
                Some(name) => filter(name, Some(left), vec![CallArg::Pos(right)], span),
                None => Expr::BinOp(Spanned::new(ast::BinOp { op: binary.op, left, right }, span)),
            }
        }
        Expr::Compare(compare) => {
            let ops = compare.ops.iter().map(|op| ast::CompareOp { op: op.op, expr: expression(&op.expr) }).collect();
            Expr::Compare(Spanned::new(ast::Compare { expr: expression(&compare.expr), ops }, span))
        }
        Expr::IfExpr(choice) => {
            let [test_expr, true_expr] = [&choice.test_expr, &choice.true_expr].map(expression);
            Expr::IfExpr(Spanned::new(ast::IfExpr { test_expr, true_expr, false_expr: optional(&choice.false_expr) }, span))
        }
        Expr::Filter(applied) => {
            let name = CallArg::Pos(constant(Value::from(applied.name), span));
            filter(APPLY, optional(&applied.expr), [name].into_iter().chain(arguments(&applied.args)).collect(), span)
        }
        Expr::Test(test) => Expr::Test(Spanned::new(ast::Test { name: test.name, expr: expression(&test.expr), args: arguments(&test.args) }, span)),
        Expr::GetAttr(get) => Expr::GetAttr(Spanned::new(ast::GetAttr { expr: expression(&get.expr), name: get.name }, span)),
        Expr::GetItem(get) => {
            let [expr, subscript_expr] = [&get.expr, &get.subscript_expr].map(expression);
            Expr::GetItem(Spanned::new(ast::GetItem { expr, subscript_expr }, span))
        }
        Expr::Call(called) => counted(Expr::Call(call(called))),
        Expr::List(list) => counted(Expr::List(Spanned::new(ast::List { items: expressions(&list.items) }, span))),
        Expr::Tuple(tuple) => counted(Expr::Tuple(Spanned::new(ast::Tuple { items: expressions(&tuple.items) }, span))),
        Expr::Map(map) => counted(Expr::Map(Spanned::new(ast::Map { keys: expressions(&map.keys), values: expressions(&map.values) }, span))),
    }
}

/// Copies the target of an assignment.
fn target<'s>(expr: &Expr<'s>) -> Expr<'s> {
    match expr {
        Expr::Tuple(tuple) => Expr::Tuple(Spanned::new(ast::Tuple { items: tuple.items.iter().map(target).collect() }, tuple.span())),
        Expr::List(list) => Expr::List(Spanned::new(ast::List { items: list.items.iter().map(target).collect() }, list.span())),
        other => expression(other),
    }
}

fn statements<'s>(list: &[Stmt<'s>]) -> Result<Vec<Stmt<'s>>, Error> {
    list.iter().map(statement).collect()
}

fn declaration<'s>(stored: &Spanned<ast::Macro<'s>>) -> Result<Spanned<ast::Macro<'s>>, Error> {
    let args = stored.args.iter().map(target).collect();
    let declared = ast::Macro { name: stored.name, args, defaults: expressions(&stored.defaults), body: statements(&stored.body)? };
    Ok(Spanned::new(declared, stored.span()))
}

fn statement<'s>(stmt: &Stmt<'s>) -> Result<Stmt<'s>, Error> {
    Ok(match stmt {
        Stmt::Template(t) => Stmt::Template(Spanned::new(ast::Template { children: statements(&t.children)? }, t.span())),
        Stmt::EmitExpr(s) => Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr: expression(&s.expr) }, s.span())),
        // The formatter of the environment counts the text.
        Stmt::EmitRaw(s) => Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr: constant(Value::from(s.raw), s.span()) }, s.span())),
        Stmt::ForLoop(s) => {
            let (iter, filter_expr) = (expression(&s.iter), optional(&s.filter_expr));
            let (body, else_body) = (statements(&s.body)?, statements(&s.else_body)?);
            Stmt::ForLoop(Spanned::new(ast::ForLoop { target: target(&s.target), iter, filter_expr, recursive: s.recursive, body, else_body }, s.span()))
        }
        Stmt::IfCond(s) => {
            let (true_body, false_body) = (statements(&s.true_body)?, statements(&s.false_body)?);
            Stmt::IfCond(Spanned::new(ast::IfCond { expr: expression(&s.expr), true_body, false_body }, s.span()))
        }
        Stmt::WithBlock(s) => {
            let assignments = s.assignments.iter().map(|(name, value)| (target(name), expression(value))).collect();
            Stmt::WithBlock(Spanned::new(ast::WithBlock { assignments, body: statements(&s.body)? }, s.span()))
        }
        Stmt::Set(s) => Stmt::Set(Spanned::new(ast::Set { target: target(&s.target), expr: expression(&s.expr) }, s.span())),
        Stmt::SetBlock(s) => {
            let (target, filter, body) = (target(&s.target), optional(&s.filter), statements(&s.body)?);
            Stmt::SetBlock(Spanned::new(ast::SetBlock { target, filter, body }, s.span()))
        }
        Stmt::FilterBlock(s) => Stmt::FilterBlock(Spanned::new(ast::FilterBlock { filter: expression(&s.filter), body: statements(&s.body)? }, s.span())),
        Stmt::Block(s) => Stmt::Block(Spanned::new(ast::Block { name: s.name, required: s.required, body: statements(&s.body)? }, s.span())),
        Stmt::Macro(s) => Stmt::Macro(declaration(s)?),
        Stmt::CallBlock(s) => Stmt::CallBlock(Spanned::new(ast::CallBlock { call: call(&s.call), macro_decl: declaration(&s.macro_decl)? }, s.span())),
        Stmt::Continue(s) => Stmt::Continue(Spanned::new(ast::Continue, s.span())),
        Stmt::Break(s) => Stmt::Break(Spanned::new(ast::Break, s.span())),
        Stmt::Do(s) => Stmt::Do(Spanned::new(ast::Do { call: call(&s.call) }, s.span())),
        _ => return Err(Error::new(ErrorKind::InvalidOperation, "imports, `autoescape` and other templates are not supported")),
    })
}
