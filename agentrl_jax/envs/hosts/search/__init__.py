"""Question answering with a search engine: DeepSearch and TriviaQA."""
