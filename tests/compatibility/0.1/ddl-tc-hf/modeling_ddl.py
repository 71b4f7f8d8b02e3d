"""Deep Delta Learning, for AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True).

The model itself is in the package ddl-rs; `import ddl.hf` does the same as this file.
"""

try:
    from ddl.hf import DDLConfig, DDLForCausalLM
except ModuleNotFoundError as error:
    raise ImportError(
        f"this model needs the package ddl-rs, pip install 'ddl-rs[hf]': {error}"
    ) from error

__all__ = ["DDLConfig", "DDLForCausalLM"]
