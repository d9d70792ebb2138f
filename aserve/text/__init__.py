"""Between text and tokens: tokenizer, detokenizer, stops, chat templates, tools, grammars."""
