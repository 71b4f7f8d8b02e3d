"""One call of an operator by native code alone: no torch, and of the package declarations.py alone.

    python without_torch.py NATIVE STAND_IN < call.json

NATIVE is the extension and STAND_IN a build of stand_in_torch.c. The call is {"operator": name,
"arguments": {name: value}}. A tensor is {"shape": …, "strides": …, "numbers": …}, and an argument
that is left out is None. Prints the outputs, None for an absent one, or the sentence that refuses
the call.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from ctypes import byref, c_bool, c_double, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

DECLARATIONS = Path(__file__).parents[2] / "python" / "ddl" / "ops" / "declarations.py"
FLOAT32 = 6  # torch's number
KERNEL = ctypes.CFUNCTYPE(None, ctypes.POINTER(c_uint64), c_uint64, c_uint64)


def load(name: str, path: str | Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_defined(torch: ctypes.CDLL, tensor: int) -> bool:
    defined = c_bool()
    torch.aoti_torch_is_defined(c_void_p(tensor), byref(defined))
    return defined.value


def numbers_of(torch: ctypes.CDLL, tensor: int) -> ctypes.Array[ctypes.c_float]:
    data, dim, sizes = c_void_p(), c_int64(), ctypes.POINTER(c_int64)()
    torch.aoti_torch_get_data_ptr(c_void_p(tensor), byref(data))
    torch.aoti_torch_get_dim(c_void_p(tensor), byref(dim))
    torch.aoti_torch_get_sizes(c_void_p(tensor), byref(sizes))
    count = 1
    for axis in range(dim.value):
        count *= sizes[axis]
    return (ctypes.c_float * count).from_address(data.value)


def tensor_of(torch: ctypes.CDLL, value: dict[str, Any]) -> int:
    made, dim = c_void_p(), len(value["shape"])
    sizes, strides = ((c_int64 * dim)(*value[name]) for name in ("shape", "strides"))
    torch.aoti_torch_empty_strided(c_int64(dim), sizes, strides, FLOAT32, 0, -1, byref(made))
    numbers_of(torch, made.value)[:] = value["numbers"]
    return made.value


def word_of(torch: ctypes.CDLL, kind: str, value: Any) -> int:
    """The word of the dispatcher's stack for an argument."""
    if kind.endswith("?"):
        if value is None:
            return 0
        torch.stand_in_new_word.restype = ctypes.POINTER(c_uint64)
        word = torch.stand_in_new_word()
        word[0] = word_of(torch, kind[:-1], value)
        return ctypes.cast(word, c_void_p).value
    if kind == "Tensor":
        return tensor_of(torch, value)
    if kind == "float":
        return c_uint64.from_buffer(c_double(value)).value
    return int(value or 0)


def main() -> None:
    native, path = load("_native", sys.argv[1]), sys.argv[2]
    torch, given = ctypes.CDLL(path), json.load(sys.stdin)
    operators = load("declarations", DECLARATIONS).OPERATORS
    [operator] = [operator for operator in operators if operator.name == given["operator"]]
    try:
        native.register(path, operator.name, operator.declared, ["CPU", "CUDA"])
    except ImportError as error:
        print(json.dumps({"error": str(error)}))
        return
    outputs = operator.outputs
    schemas = [argument.split() for argument in operator.declared]
    words = [word_of(torch, kind, given["arguments"].get(name)) for kind, name in schemas]
    stack = (c_uint64 * max(len(words), len(outputs)))(*words)
    torch.stand_in_kernel.restype = c_void_p
    kernel = KERNEL(torch.stand_in_kernel(given["operator"].encode()))
    kernel(stack, len(words), len(outputs))
    refusal = ctypes.create_string_buffer(1000)
    ctypes.memmove(refusal, (ctypes.c_char * 1000).in_dll(torch, "stand_in_refusal"), 1000)
    done = {"refusal": refusal.value.decode()}
    for name in ("version", "words", "tensors"):
        done[name] = c_int64.in_dll(torch, f"stand_in_{name}").value
    if not done["refusal"]:
        done["outputs"] = {
            name: list(numbers_of(torch, stack[at])) if is_defined(torch, stack[at]) else None
            for at, name in enumerate(outputs)
        }
    print(json.dumps(done))


if __name__ == "__main__":
    main()
