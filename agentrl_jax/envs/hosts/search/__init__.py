"""Questions to answer with a search engine: DeepSearch and TriviaQA."""
