"""The tokenizer of a GGUF file, for the training script and the goldens."""


def gguf_tokenizer(path):
    """A `tokenizers` byte-level BPE from a GGUF vocabulary of model gpt2 with pre-tokenizer smollm."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    reader = gguf.GGUFReader(path)

    def field(key):
        return reader.fields[key].contents()

    if (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")) != ("gpt2", "smollm"):
        raise ValueError(f"got tokenizer {field('tokenizer.ggml.model')}/{field('tokenizer.ggml.pre')}, "
                         "wanted gpt2/smollm")
    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, field("tokenizer.ggml.token_type")) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer
