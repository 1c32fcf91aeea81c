//! Python's pickles, as data. A pickle is a program for a stack machine that may call anything; here, calls are written down and nothing is
//! called (<https://docs.python.org/3/library/pickletools.html>, protocols 2 to 5).
//!
//! Values lie in one list and name each other by their places. So none lies inside another in memory, and a pickle of `n` bytes makes at most `n`
//! of them, and copies no more pairs of dictionaries.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::HashMap;

/// The place of a value.
pub type Id = usize;

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// A float, bytes, or an integer of more than 64 bits, which nobody asks for here.
    Other,
    Text(String),
    /// A tuple, a list or a set.
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// A class or function, as `module name`.
    Global(String),
    /// What a function would give for arguments.
    Call {
        function: Id,
        arguments: Id,
    },
    /// Something that lies outside the pickle.
    Outside(Id),
}

/// The values of a pickle.
#[derive(Debug, Default)]
pub struct Pickle {
    values: Vec<Value>,
    /// What it gives.
    pub root: Id,
    /// Its bytes.
    pub length: usize,
}

impl Pickle {
    /// Reads a pickle from the beginning of some bytes.
    ///
    /// # Errors
    /// What is wrong with it, or not read.
    pub fn read(bytes: &[u8]) -> Result<Pickle, String> {
        let mut machine = Machine { bytes, at: 0, pickle: Pickle::default(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new(), copied: 0 };
        while machine.step()? {
            machine.require_few()?;
        }
        machine.pickle.root = machine.pop()?;
        machine.pickle.length = machine.at;
        Ok(machine.pickle)
    }

    /// The places of all values.
    pub fn all(&self) -> std::ops::Range<Id> {
        0..self.values.len()
    }

    /// A value.
    pub fn get(&self, id: Id) -> &Value {
        self.values.get(id).unwrap_or(&Value::None)
    }

    /// A text.
    pub fn text(&self, id: Id) -> Option<&str> {
        if let Value::Text(text) = self.get(id) { Some(text) } else { None }
    }

    /// The elements of a tuple or list.
    pub fn list(&self, id: Id) -> Option<&[Id]> {
        if let Value::List(list) = self.get(id) { Some(list) } else { None }
    }

    /// A number that is not negative.
    pub fn size(&self, id: Id) -> Option<u64> {
        if let Value::Int(int) = self.get(id) { u64::try_from(*int).ok() } else { None }
    }

    /// The name of a class or function.
    pub fn global(&self, id: Id) -> Option<&str> {
        if let Value::Global(name) = self.get(id) { Some(name) } else { None }
    }

    /// What is called, with its arguments.
    pub fn call(&self, id: Id) -> Option<(&str, &[Id])> {
        let Value::Call { function, arguments } = self.get(id) else { return None };
        Some((self.global(*function)?, self.list(*arguments)?))
    }
}

/// Most values of a pickle, four times as many as those of a dictionary of 60,000 tensors.
const MOST_VALUES: usize = 4 << 20;
/// Values of a pickle in addition to one for every two bytes, which numbers take at least.
const SPARE_VALUES: usize = 1 << 10;
/// Longest name of a class.
const LONGEST_NAME: usize = 4096;

/// Classes whose objects are dictionaries.
const DICTS: [&str; 5] = ["collections OrderedDict", "collections defaultdict", "collections Counter", "builtins dict", "__builtin__ dict"];

struct Machine<'b> {
    bytes: &'b [u8],
    at: usize,
    pickle: Pickle,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
    /// Pairs of dictionaries that were made of lists.
    copied: usize,
}

impl<'b> Machine<'b> {
    fn take(&mut self, count: u64) -> Result<&'b [u8], String> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let taken = usize::try_from(count).ok().and_then(|count| rest.get(..count)).ok_or("it ends in the middle (is the file truncated?)")?;
        self.at = self.at.saturating_add(taken.len());
        Ok(taken)
    }

    /// A number without a sign, lowest byte first.
    fn number(&mut self, bytes: u64) -> Result<u64, String> {
        Ok(self.take(bytes)?.iter().rev().fold(0, |number, byte| (number << 8) | u64::from(*byte)))
    }

    fn line(&mut self) -> Result<&'b str, String> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let length = rest.iter().position(|byte| *byte == b'\n').ok_or("a name has no end")?;
        let line = self.take(length as u64)?;
        self.at = self.at.saturating_add(1);
        std::str::from_utf8(line).map_err(|_| "a name is not UTF-8".to_owned())
    }

    fn text(&mut self, length: u64) -> Result<Value, String> {
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map(|text| Value::Text(text.to_owned())).map_err(|_| "a text is not UTF-8".to_owned())
    }

    fn pop(&mut self) -> Result<Id, String> {
        // What lies below a mark belongs to what the mark began.
        let low = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() > low { self.stack.pop().ok_or_else(empty) } else { Err(empty()) }
    }

    /// Everything above the last mark, which goes.
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

    /// Refuses pickles whose values would take many times the memory of their bytes.
    fn require_few(&self) -> Result<(), String> {
        let (values, most) = (self.pickle.values.len(), MOST_VALUES.min((self.bytes.len() / 2).saturating_add(SPARE_VALUES)));
        // Each value is kept for later at most once.
        if values.max(self.memo.len()) > most {
            return Err(format!(
                "it has more than {most} values in {} bytes, which no dictionary of tensors has: save only the weights, with torch.save(model.state_dict(), ...)",
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

    /// Adds to the dictionary on the stack; objects of unknown classes keep nothing.
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
        let made = match self.pickle.global(function) {
            Some(name) if DICTS.contains(&name) => {
                let pairs = self.pairs(arguments);
                self.copied = self.copied.saturating_add(pairs.len());
                if self.copied > self.bytes.len() {
                    return Err("it makes dictionaries of one list again and again".into());
                }
                Value::Dict(pairs)
            }
            _ => Value::Call { function, arguments },
        };
        self.push(made);
        Ok(())
    }

    /// The pairs that a dictionary is made of, if it is made of any.
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
        let id = *self.memo.get(&key).ok_or_else(|| format!("it uses the value {key}, which it has not kept"))?;
        self.stack.push(id);
        Ok(())
    }

    /// Does one thing; `false` at the end.
    fn step(&mut self) -> Result<bool, String> {
        let opcode = self.number(1)? as u8;
        match opcode {
            b'.' => return Ok(false),
            // Protocol and frames say nothing about values.
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
                    return Err("a class has a name without end".into());
                }
                let global = Value::Global(format!("{module} {name}"));
                self.push(global);
            }
            // Objects are what their classes would make; named arguments are not asked for.
            0x92 => {
                self.pop()?;
                self.call()?;
            }
            b'R' | 0x81 => self.call()?,
            // The state of an object is not asked for: that of a dictionary of weights is about its modules' versions.
            b'b' => drop(self.pop()?),
            b'Q' => {
                let id = self.pop()?;
                self.push(Value::Outside(id));
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
            other => return Err(format!("instruction {other:#04x} of Python's pickles is not read")),
        }
        Ok(true)
    }
}

fn empty() -> String {
    "it takes values that are not there".into()
}

/// An integer in two's complement, lowest byte first.
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
    fn values_are_those_of_python() {
        // `pickle.dumps` of a dictionary, protocols 2 and 4, written down by Python.
        let two = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01X\x01\x00\x00\x00bq\x02]q\x03(J\xff\xff\xff\xffN\x88\x8a\x05\x00\x00\x00\x00\x01euX\x01\x00\x00\x00cs.";
        assert!(Pickle::read(two).is_err(), "a key without a value");
        let two = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01X\x01\x00\x00\x00bq\x02]q\x03(J\xff\xff\xff\xffN\x88\x8a\x05\x00\x00\x00\x00\x01eu. rest";
        let pickle = Pickle::read(two).unwrap();
        assert_eq!(shown(&pickle, pickle.root), r#"{Text("a"):Int(1) Text("b"):[Int(-1) None Bool(true) Int(4294967296)]}"#);
        assert_eq!(pickle.length, two.len() - 5);
        let four = b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x0bcollections\x94\x8c\x0bOrderedDict\x94\x93\x94)R\x94\x8c\x01x\x94h\x03s.";
        let pickle = Pickle::read(four).unwrap();
        assert!(matches!(pickle.get(pickle.root), Value::Dict(pairs) if pairs[0].1 == pickle.root), "it holds itself");
        // Nothing is called.
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
        // A million lists in each other need no deep stack, and a value that is named twice lies there once.
        let deep: Vec<u8> = std::iter::repeat_n(b']', 1_000_000).chain(std::iter::repeat_n(b'a', 999_999)).chain(*b".").collect();
        drop(Pickle::read(&deep).unwrap());
        for flood in [vec![b']'; 1 << 16], [b"]".to_vec(), vec![0x94; 1 << 16]].concat()] {
            let error = Pickle::read(&[flood, b".".to_vec()].concat()).unwrap_err();
            assert!(error.contains("which no dictionary of tensors has"), "{error}");
        }
        let doubled: Vec<u8> = b"]".iter().copied().chain((0..100).flat_map(|_| *b"2\x86")).chain(*b".").collect();
        assert_eq!(Pickle::read(&doubled).unwrap().values.len(), 101);
    }
}
