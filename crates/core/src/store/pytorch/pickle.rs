//! Python pickles, parsed as data. A pickle is a program for a stack machine that can call arbitrary
//! functions. Here, calls are recorded and nothing is executed
//! (<https://docs.python.org/3/library/pickletools.html>, protocols 2 to 5).
//!
//! Values are stored in one list and refer to each other by index. Thus, nesting does not consume stack,
//! and a pickle of `n` bytes yields at most `n` values and copies no more pairs of dictionaries.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::HashMap;

/// Index of a value.
pub type Id = usize;

/// A value of a pickle.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// A float, bytes, or an integer of more than 64 bits. Its value is not needed.
    Other,
    Text(String),
    /// A tuple, a list or a set.
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// A class or function, as `module name`.
    Global(String),
    /// A recorded function call.
    Call {
        function: Id,
        arguments: Id,
    },
    /// A persistent id: an object stored outside the pickle.
    Persistent(Id),
}

/// A parsed pickle.
#[derive(Debug, Default)]
pub struct Pickle {
    values: Vec<Value>,
    /// The resulting value.
    pub root: Id,
    /// Length of the pickle in bytes.
    pub length: usize,
}

impl Pickle {
    /// Parses a pickle at the start of `bytes`. The error describes invalid or unsupported contents.
    pub fn read(bytes: &[u8]) -> Result<Pickle, String> {
        let mut machine = Machine { bytes, at: 0, pickle: Pickle::default(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new(), copied: 0 };
        while machine.step()? {
            machine.check_size()?;
        }
        machine.pickle.root = machine.pop()?;
        machine.pickle.length = machine.at;
        Ok(machine.pickle)
    }

    /// The indices of all values.
    pub fn all(&self) -> std::ops::Range<Id> {
        0..self.values.len()
    }

    /// The value with an index.
    pub fn get(&self, id: Id) -> &Value {
        self.values.get(id).unwrap_or(&Value::None)
    }

    /// The value as a string.
    pub fn text(&self, id: Id) -> Option<&str> {
        if let Value::Text(text) = self.get(id) { Some(text) } else { None }
    }

    /// The elements, if the value is a tuple or list.
    pub fn list(&self, id: Id) -> Option<&[Id]> {
        if let Value::List(list) = self.get(id) { Some(list) } else { None }
    }

    /// The value as a non-negative integer.
    pub fn size(&self, id: Id) -> Option<u64> {
        if let Value::Int(int) = self.get(id) { u64::try_from(*int).ok() } else { None }
    }

    /// The name, if the value is a class or function.
    pub fn global(&self, id: Id) -> Option<&str> {
        if let Value::Global(name) = self.get(id) { Some(name) } else { None }
    }

    /// The name of the called function and its arguments, if the value is a call.
    pub fn call(&self, id: Id) -> Option<(&str, &[Id])> {
        let Value::Call { function, arguments } = self.get(id) else { return None };
        Some((self.global(*function)?, self.list(*arguments)?))
    }
}

/// Maximum number of values, four times as many as a dictionary of 60,000 tensors needs.
const MAX_VALUES: usize = 4 << 20;
/// Values allowed in addition to one per two bytes, the minimum size of an encoded number.
const SPARE_VALUES: usize = 1 << 10;
/// Maximum length of a class name.
const LONGEST_NAME: usize = 4096;

/// Classes that are treated as dictionaries.
const DICTS: [&str; 5] = ["collections OrderedDict", "collections defaultdict", "collections Counter", "builtins dict", "__builtin__ dict"];

struct Machine<'b> {
    bytes: &'b [u8],
    at: usize,
    pickle: Pickle,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
    /// Number of pairs copied from lists into dictionaries.
    copied: usize,
}

impl<'b> Machine<'b> {
    fn take(&mut self, count: u64) -> Result<&'b [u8], String> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let taken = usize::try_from(count).ok().and_then(|count| rest.get(..count)).ok_or("it ends unexpectedly (is the file truncated?)")?;
        self.at = self.at.saturating_add(taken.len());
        Ok(taken)
    }

    /// An unsigned little-endian integer.
    fn number(&mut self, bytes: u64) -> Result<u64, String> {
        Ok(self.take(bytes)?.iter().rev().fold(0, |number, byte| (number << 8) | u64::from(*byte)))
    }

    fn line(&mut self) -> Result<&'b str, String> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let length = rest.iter().position(|byte| *byte == b'\n').ok_or("a name is not terminated")?;
        let line = self.take(length as u64)?;
        self.at = self.at.saturating_add(1);
        std::str::from_utf8(line).map_err(|_| "a name is not UTF-8".to_owned())
    }

    fn text(&mut self, length: u64) -> Result<Value, String> {
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map(|text| Value::Text(text.to_owned())).map_err(|_| "a text is not UTF-8".to_owned())
    }

    fn pop(&mut self) -> Result<Id, String> {
        // Values below the mark must not be consumed.
        let low = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() > low { self.stack.pop().ok_or_else(empty) } else { Err(empty()) }
    }

    /// Pops all values above the last mark, and the mark.
    fn marked(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().ok_or("a mark is missing")?;
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    fn last(&self, count: usize) -> Result<Vec<Id>, String> {
        let low = self.stack.len().checked_sub(count).ok_or_else(empty)?;
        Ok(self.stack.get(low..).unwrap_or_default().to_vec())
    }

    fn top(&self) -> Result<Id, String> {
        self.stack.last().copied().ok_or_else(empty)
    }

    fn push(&mut self, value: Value) {
        self.stack.push(self.pickle.values.len());
        self.pickle.values.push(value);
    }

    /// Rejects pickles whose values would need much more memory than their bytes.
    fn check_size(&self) -> Result<(), String> {
        let (values, limit) = (self.pickle.values.len(), MAX_VALUES.min((self.bytes.len() / 2).saturating_add(SPARE_VALUES)));
        // Each value is memoized at most once.
        if values.max(self.memo.len()) > limit {
            return Err(format!(
                "it has more than {limit} values in {} bytes, too many for a dictionary of tensors; save only the weights, with torch.save(model.state_dict(), ...)",
                self.bytes.len()
            ));
        }
        Ok(())
    }

    fn tuple(&mut self, count: usize) -> Result<(), String> {
        let elements = self.last(count)?;
        for _ in 0..count {
            self.pop()?;
        }
        self.push(Value::List(elements));
        Ok(())
    }

    /// Adds pairs to the dictionary on top of the stack. They are dropped for objects of unknown
    /// classes.
    fn items(&mut self, items: &[Id]) -> Result<(), String> {
        let pairs = items.chunks(2).map(|pair| if let [key, value] = pair { Ok((*key, *value)) } else { Err("a key has no value".to_owned()) });
        let pairs = pairs.collect::<Result<Vec<_>, _>>()?;
        let top = self.top()?;
        if let Some(Value::Dict(all)) = self.pickle.values.get_mut(top) {
            all.extend(pairs);
        }
        Ok(())
    }

    fn elements(&mut self, elements: Vec<Id>) -> Result<(), String> {
        let top = self.top()?;
        if let Some(Value::List(all)) = self.pickle.values.get_mut(top) {
            all.extend(elements);
        }
        Ok(())
    }

    fn call(&mut self) -> Result<(), String> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let value = match self.pickle.global(function) {
            Some(name) if DICTS.contains(&name) => {
                let pairs = self.pairs(arguments);
                self.copied = self.copied.saturating_add(pairs.len());
                if self.copied > self.bytes.len() {
                    return Err("it creates several dictionaries from one list".into());
                }
                Value::Dict(pairs)
            }
            _ => Value::Call { function, arguments },
        };
        self.push(value);
        Ok(())
    }

    /// The pairs from which a dictionary is constructed, if any.
    fn pairs(&self, arguments: Id) -> Vec<(Id, Id)> {
        let pairs = self.pickle.list(arguments).and_then(|arguments| self.pickle.list(*arguments.first()?)).unwrap_or_default();
        pairs.iter().filter_map(|pair| <[Id; 2]>::try_from(self.pickle.list(*pair)?).ok().map(|[key, value]| (key, value))).collect()
    }

    fn memoize(&mut self, key: u64) -> Result<(), String> {
        let top = self.top()?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, key: u64) -> Result<(), String> {
        let id = *self.memo.get(&key).ok_or_else(|| format!("it uses the value {key}, which was not memoized"))?;
        self.stack.push(id);
        Ok(())
    }

    /// Executes one instruction. Returns `false` at the end.
    fn step(&mut self) -> Result<bool, String> {
        let opcode = self.number(1)? as u8;
        match opcode {
            b'.' => return Ok(false),
            // Protocol and frames do not affect the values.
            0x80 => drop(self.take(1)?),
            0x95 => drop(self.take(8)?),
            b'(' => self.marks.push(self.stack.len()),
            b'0' if self.marks.last() == Some(&self.stack.len()) => drop(self.marks.pop()),
            b'0' => drop(self.pop()?),
            b'1' => drop(self.marked()?),
            b'2' => self.stack.push(self.top()?),
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'J' => {
                let number = self.number(4)? as u32;
                self.push(Value::Int(i64::from(number.cast_signed())));
            }
            b'K' | b'M' => {
                let number = self.number(if opcode == b'K' { 1 } else { 2 })?;
                self.push(Value::Int(number.cast_signed()));
            }
            0x8a | 0x8b => {
                let length = self.number(if opcode == 0x8a { 1 } else { 4 })?;
                let value = integer(self.take(length)?);
                self.push(value);
            }
            b'G' => {
                self.take(8)?;
                self.push(Value::Other);
            }
            b'X' | 0x8c | 0x8d | b'U' | b'T' => {
                let length = self.number(match opcode {
                    0x8c | b'U' => 1,
                    0x8d => 8,
                    _ => 4,
                })?;
                let text = self.text(length)?;
                self.push(text);
            }
            b'B' | b'C' | 0x8e | 0x96 => {
                let length = self.number(match opcode {
                    b'C' => 1,
                    b'B' => 4,
                    _ => 8,
                })?;
                self.take(length)?;
                self.push(Value::Other);
            }
            b']' | b')' | 0x8f => self.push(Value::List(Vec::new())),
            b't' | 0x91 => {
                let elements = self.marked()?;
                self.push(Value::List(elements));
            }
            0x85 => self.tuple(1)?,
            0x86 => self.tuple(2)?,
            0x87 => self.tuple(3)?,
            b'a' => {
                let element = self.pop()?;
                self.elements(vec![element])?;
            }
            b'e' | 0x90 => {
                let elements = self.marked()?;
                self.elements(elements)?;
            }
            b'}' => self.push(Value::Dict(Vec::new())),
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.items(&[key, value])?;
            }
            b'u' => {
                let items = self.marked()?;
                self.items(&items)?;
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Value::Global(format!("{module} {name}")));
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let (Some(module), Some(name)) = (self.pickle.text(module), self.pickle.text(name)) else { return Err("a class has no name".into()) };
                if module.len().saturating_add(name.len()) > LONGEST_NAME {
                    return Err("a class has too long a name".into());
                }
                let global = Value::Global(format!("{module} {name}"));
                self.push(global);
            }
            // Objects are recorded as calls of their classes, without keyword arguments.
            0x92 => {
                self.pop()?;
                self.call()?;
            }
            b'R' | 0x81 => self.call()?,
            // The state of objects is ignored: that of a state dict only contains the modules' versions.
            b'b' => drop(self.pop()?),
            b'Q' => {
                let id = self.pop()?;
                self.push(Value::Persistent(id));
            }
            b'q' | b'r' => {
                let key = self.number(if opcode == b'q' { 1 } else { 4 })?;
                self.memoize(key)?;
            }
            0x94 => self.memoize(self.memo.len() as u64)?,
            b'h' | b'j' => {
                let key = self.number(if opcode == b'h' { 1 } else { 4 })?;
                self.recall(key)?;
            }
            other => return Err(format!("the pickle instruction {other:#04x} is not supported")),
        }
        Ok(true)
    }
}

fn empty() -> String {
    "it pops values from an empty stack".into()
}

/// A two's-complement little-endian integer.
fn integer(bytes: &[u8]) -> Value {
    if bytes.len() > 8 {
        return Value::Other;
    }
    let fill = if bytes.last().is_some_and(|last| *last >= 0x80) { 0xff } else { 0 };
    let mut all = [fill; 8];
    all.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    Value::Int(i64::from_le_bytes(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(pickle: &Pickle, id: Id) -> String {
        match pickle.get(id) {
            Value::List(list) => format!("[{}]", list.iter().map(|id| shown(pickle, *id)).collect::<Vec<_>>().join(" ")),
            Value::Dict(pairs) => {
                format!("{{{}}}", pairs.iter().map(|(k, v)| format!("{}:{}", shown(pickle, *k), shown(pickle, *v))).collect::<Vec<_>>().join(" "))
            }
            Value::Call { function, arguments } => format!("{}{}", shown(pickle, *function), shown(pickle, *arguments)),
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn values_equal_those_of_python() {
        // `pickle.dumps` of a dictionary, protocols 2 and 4, generated by Python.
        let two = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01X\x01\x00\x00\x00bq\x02]q\x03(J\xff\xff\xff\xffN\x88\x8a\x05\x00\x00\x00\x00\x01euX\x01\x00\x00\x00cs.";
        assert!(Pickle::read(two).is_err(), "a key without a value");
        let two = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01X\x01\x00\x00\x00bq\x02]q\x03(J\xff\xff\xff\xffN\x88\x8a\x05\x00\x00\x00\x00\x01eu. rest";
        let pickle = Pickle::read(two).unwrap();
        assert_eq!(shown(&pickle, pickle.root), r#"{Text("a"):Int(1) Text("b"):[Int(-1) None Bool(true) Int(4294967296)]}"#);
        assert_eq!(pickle.length, two.len() - 5);
        let four = b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x0bcollections\x94\x8c\x0bOrderedDict\x94\x93\x94)R\x94\x8c\x01x\x94h\x03s.";
        let pickle = Pickle::read(four).unwrap();
        assert!(matches!(pickle.get(pickle.root), Value::Dict(pairs) if pairs[0].1 == pickle.root), "it contains itself");
        // Nothing is executed.
        let call = b"cos\nsystem\n(X\x02\x00\x00\x00lstR.";
        let pickle = Pickle::read(call).unwrap();
        assert_eq!(pickle.call(pickle.root).map(|(name, arguments)| (name, arguments.len())), Some(("os system", 1)));
    }

    #[test]
    fn wrong_pickles_are_errors() {
        for bytes in [
            &b""[..],
            b"\x80",
            b"}q",
            b"K\x01",
            b".",
            b"t.",
            b"0.",
            b"h\x05.",
            b"X\xff\xff\xff\xffab.",
            b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.",
            b"cos\n",
            b"(s.",
            b"I1\n.",
            b"\x97.",
        ] {
            assert!(Pickle::read(bytes).is_err(), "{bytes:?}");
        }
        // A million nested lists must not overflow the stack, and shared values are stored once.
        let deep: Vec<u8> = std::iter::repeat_n(b']', 1_000_000).chain(std::iter::repeat_n(b'a', 999_999)).chain(*b".").collect();
        drop(Pickle::read(&deep).unwrap());
        for flood in [vec![b']'; 1 << 16], [b"]".to_vec(), vec![0x94; 1 << 16]].concat()] {
            let error = Pickle::read(&[flood, b".".to_vec()].concat()).unwrap_err();
            assert!(error.contains("too many for a dictionary of tensors"), "{error}");
        }
        let doubled: Vec<u8> = b"]".iter().copied().chain((0..100).flat_map(|_| *b"2\x86")).chain(*b".").collect();
        assert_eq!(Pickle::read(&doubled).unwrap().values.len(), 101);
    }
}
