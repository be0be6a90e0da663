"""Search: document retrieval, question files, and episodes in each dialect."""

import collections
import contextlib
import dataclasses
import json
import math
import pathlib
import random
import threading
import time

import fastapi
import host_worlds as hosts
import pytest
import uvicorn

from agentrl_jax.envs.hosts import server
from agentrl_jax.envs.hosts.agentgym import AgentGym, Servers
from agentrl_jax.envs.hosts.search import dialects, drawn, questions, retrieval, world
from agentrl_jax.envs.hosts.search.world import Search, SearchQA
from agentrl_jax.envs.hosts.world import Reply, WorldDown, WorldError
from agentrl_jax.envs.splits import SPLITS

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXTS = (
    ('Lyon', 'Lyon is a city on the Rhone.'),
    ('Paris', 'Paris is the capital of France, and a city. Paris lies on the Seine.'),
    ('Seine', 'The Seine flows through Paris.'),
    ('Oslo', 'Oslo is a capital too.'),
)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp('corpus') / 'wiki-18.jsonl'
    rows = retrieval.as_rows(TEXTS)
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows), encoding='utf-8')
    return str(path)


@pytest.fixture(scope='module')
def question_file(tmp_path_factory):
    path = tmp_path_factory.mktemp('asked') / 'questions.jsonl'
    row = {'question': 'What is the capital of France?', 'golden_answers': ['Paris', 'paris']}
    path.write_text(json.dumps(row) + '\n', encoding='utf-8')
    return str(path)


def items(split, **settings):
    return world.SearchEnvironment(**settings).our_items(split).tolist()


# ---- documents ---------------------------------------------------------------------------------


def test_scores_are_those_of_bm25(corpus):
    index = retrieval.Index.build(list(retrieval.read_documents(corpus)))
    bags = [retrieval.words(document['contents']) for document in index.documents]
    mean = sum(map(len, bags)) / len(bags)
    query = ['capital', 'paris', 'capital']

    def score(bag):
        total = 0.0
        for word in query:
            held = sum(word in other for other in bags)
            rarity = math.log(1 + (len(bags) - held + 0.5) / (held + 0.5))
            count = bag.count(word)
            total += rarity * count / (count + 0.9 * (1 - 0.4 + 0.4 * len(bag) / mean))
        return total

    hits = index.search(' '.join(query), 4)
    expected = sorted(((score(bag), number) for number, bag in enumerate(bags)), reverse=True)
    expected = [(number, score) for score, number in expected if score]
    assert [int(document['id']) for document, _ in hits] == [number for number, _ in expected]
    assert [score for _, score in hits] == pytest.approx([score for _, score in expected], rel=1e-5)


def test_ties_keep_the_corpus_order_and_documents_need_a_shared_word():
    index = retrieval.Index.build(retrieval.as_rows([(f't{i}', 'the same') for i in range(50)]))
    queries = ['same', '', 'nothing of this', 'the', 'SAME t7']
    hits = [[int(row['id']) for row, _ in index.search(query, 3)] for query in queries]
    assert hits == [[0, 1, 2], [], [], [], [7, 0, 1]]
    with pytest.raises(ValueError, match='the documents have no words'):
        retrieval.Index.build([{'contents': '!'}])


def test_an_index_on_disk_returns_the_results_of_the_one_in_memory(corpus, tmp_path):
    built = retrieval.Index.build(list(retrieval.read_documents(corpus)))
    built.save(tmp_path / 'index')
    mapped = retrieval.Index.load(tmp_path / 'index')
    for query in ('capital city', 'Seine', 'Oslo'):
        assert built.search(query, 3) == mapped.search(query, 3)
    assert len(mapped.documents) == 4 and not isinstance(mapped.documents, list)
    assert retrieval.open_corpus(str(tmp_path / 'index')) is retrieval.open_corpus(
        str(tmp_path / 'index')
    )
    with pytest.raises(FileExistsError, match='a new folder'):
        built.save(tmp_path / 'index')
    with pytest.raises(FileNotFoundError, match='none'):
        retrieval.open_corpus(str(tmp_path / 'none'))


# ---- a server of documents ---------------------------------------------------------------------


@contextlib.contextmanager
def running(app):
    """Yield the address of a server in a thread."""
    served = uvicorn.Server(uvicorn.Config(app, port=0, log_level='error'))
    thread = threading.Thread(target=served.run)
    thread.start()
    while not served.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f'http://127.0.0.1:{served.servers[0].sockets[0].getsockname()[1]}'
    served.should_exit = True
    thread.join()


def test_our_server_can_replace_agentgyms_searchqa_server(corpus, question_file):
    """Make the calls of its client, and of ours."""
    near, inner = (SearchQA(corpus=corpus, questions=[question_file]) for _ in range(2))
    app = fastapi.FastAPI()
    server.add_routes(app, hosts.Kept(inner), server.WORDINGS['searchqa'])
    with running(app) as url, contextlib.closing(AgentGym('searchqa', Servers([url]))) as far:
        assert far.instruction == near.instruction
        assert far.reset(0) == near.reset(0)
        for action in ('?', '<answer>Lyon</answer>', *near.plan()):
            assert main_fields(far.step(action)) == main_fields(near.step(action))
        with contextlib.closing(retrieval.Client(url)) as client:
            assert client.connection.post('create', {'id': 0}) == 5
            assert client.connection.post('reset', {'env_idx': 5, 'id': 0}) == near.reset(0)
            assert client.connection.get('observation?env_idx=5') == near.reset(0)
            stepped = client.connection.post('step', {'env_idx': 5, 'action': ''})
            assert stepped.keys() == {'observation', 'reward', 'done', 'info'}
            assert client.connection.post('close', {'env_idx': 5}) is True


def test_any_retriever_with_the_protocol_works_and_bad_answers_are_faults():
    row = {'id': '7', 'contents': '"Paris"\nA city.'}
    good = [{'result': [[hit, hit]]} for hit in ({'document': row, 'score': 0.5}, row)]
    bad = [[], {'result': []}, {'result': [[{'title': 'x'}]]}, {'result': [['x']]}]
    rows = [('dense/retrieve', 200, answer) for answer in (*good, *bad)]
    with (
        hosts.Table(rows) as table,
        contextlib.closing(retrieval.Client(f'{table.url}/dense', token='a-secret')) as client,
    ):
        for score in (0.5, 0.0):
            assert client.search('x', 1) == [(row, score)]
        sent = {'queries': ['x'], 'topk': 1, 'return_scores': True}
        assert table.asked[-1] == ('dense/retrieve', sent)
        assert table.tokens[-1] == 'Bearer a-secret'
        for _ in bad:
            with pytest.raises(WorldError):
                client.search('x', 1)
    with pytest.raises(WorldDown, match='cannot be reached'):
        retrieval.Client(table.url).search('x', 1)


# ---- questions ---------------------------------------------------------------------------------


def test_published_files_of_every_format_are_read(tmp_path):
    """The formats are TriviaQA's release and copy, NQ-open, HotpotQA and FlashRAG."""
    answer = {'Value': 'Sunset Boulevard', 'NormalizedAliases': ['sunset blvd', 'sunset boulevard']}
    release = {'Data': [{'Question': 'Which Lloyd Webber musical?', 'Answer': answer}]}
    copied = {'value': 'Oslo', 'normalized_aliases': ['oslo'], 'aliases': ['Oslo', 'Christiania']}
    rows = {
        'triviaqa.json': release,
        'copy.jsonl': {'question': 'Where?', 'question_id': 'tc_1', 'answer': copied},
        'nq.jsonl': {'question': 'who?', 'answer': ['one', 'two', 'one']},
        'hotpot.json': [{'_id': '5a', 'question': 'Same?', 'answer': 'yes', 'level': 'hard'}],
        'flashrag.jsonl': {'id': 'test_0', 'question': 'what ', 'golden_answers': ['x']},
    }
    for name, content in rows.items():
        (tmp_path / name).write_text(json.dumps(content, ensure_ascii=False), encoding='utf-8')
    read = {name: questions.read(str(tmp_path / name)) for name in rows}
    assert {name: (one.text, one.answers) for name, (one,) in read.items()} == {
        'triviaqa.json': ('Which Lloyd Webber musical?', ('sunset blvd', 'sunset boulevard')),
        'copy.jsonl': ('Where?', ('oslo',)),
        'nq.jsonl': ('who?', ('one', 'two')),
        'hotpot.json': ('Same?', ('yes',)),
        'flashrag.jsonl': ('what?', ('x',)),
    }
    (tmp_path / 'bad.jsonl').write_text('{"question": "a", "answer": "b"}\n{"question": "a"}\n')
    with pytest.raises(ValueError, match='bad.jsonl:2: '):
        questions.read(str(tmp_path / 'bad.jsonl'))
    assert questions.parse(json.loads(questions.EXAMPLE)).answers == ('Oslo',)
    (tmp_path / 'none.json').write_text('[]')
    with pytest.raises(ValueError, match='none.json'):
        questions.read(str(tmp_path / 'none.json'))
    # Rows were cut at U+2028, U+2029 and U+0085, which texts may contain
    row = {'question': 'one\u2028two\u2029three\x85four', 'answer': 'x'}
    lines = 2 * (json.dumps(row, ensure_ascii=False) + '\r\n')
    (tmp_path / 'lines.jsonl').write_bytes(lines.encode())
    loaded = questions.read(str(tmp_path / 'lines.jsonl'))
    assert [one.text for one in loaded] == 2 * [row['question']]


def test_items_are_numbered_across_the_files_of_the_splits(tmp_path):
    paths = []
    for size, name in zip((3, 2, 4), SPLITS, strict=True):
        rows = [{'question': f'{name} {i}', 'answer': 'x'} for i in range(size)]
        paths.append(str(tmp_path / f'{name}.jsonl'))
        pathlib.Path(paths[-1]).write_text('\n'.join(map(json.dumps, rows)))
    numbers = [items(split, questions=tuple(paths)) for split in SPLITS]
    assert numbers == [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
    single = [items(split, questions=(paths[2],)) for split in SPLITS]
    assert sorted(sum(single, [])) == [0, 1, 2, 3]


def test_there_are_many_country_questions_and_splits_share_no_subject():
    known = world.bank()
    assert len(known) > 9000 and len({question.text for question in known}) == len(known)
    assert collections.Counter(question.hops for question in known)[2] > 2000
    splits = [items(split) for split in SPLITS]
    assert sorted(sum(splits, [])) == list(range(len(known)))
    subjects = [{known[item].subject for item in items} for items in splits]
    assert not subjects[0] & subjects[1] | subjects[0] & subjects[2] | subjects[1] & subjects[2]
    two = items('test', hops=(2,))
    assert len(two) > 200 and {known[item].hops for item in two} == {2}


def test_an_oracle_retrieves_its_answers_and_solves_each_question():
    play, hits = SearchQA(rewards='mt_grpo', retries=False), []
    for item in random.Random(0).sample(range(len(world.bank())), 80):
        play.reset(item)
        replies = [play.step(action) for action in play.plan()]
        assert len(replies) == play.question.hops + 1
        assert replies[-1].done and replies[-1].success and replies[-1].reward > 1.8
        hits.append(play.golds.within(play.steps[-2].result))
    assert sum(hits) >= 78


# ---- episodes ----------------------------------------------------------------------------------


def play_episode(corpus, question_file, *actions, **settings):
    play = Search(corpus=corpus, questions=[question_file], **settings)
    return play, [Reply(play.reset(0)), *map(play.step, actions)]


def main_fields(reply):
    return dataclasses.replace(reply, figures=(), valid=None)


def test_agentgyms_episode_continues_until_the_answer_is_right(corpus, question_file):
    _, replies = play_episode(
        corpus,
        question_file,
        '<think>hm</think><search> capital </search><answer>Paris</answer>',
        'Paris',
        '<answer>Lyon</answer>',
        '<answer>Lyon</answer> or rather <answer>The Paris!</answer>',
        dialect='agentgym',
    )
    assert replies[0].observation.endswith(
        'every time.\n\n Question: What is the capital of France?'
    )
    assert main_fields(replies[1]) == Reply(
        '<information>Doc 1(Title: "Oslo") Oslo is a capital too.\n'
        'Doc 2(Title: "Paris") Paris is the capital of France, and a city. Paris lies on the '
        'Seine.</information>',
        success=False,
    )
    assert replies[2].observation.startswith('Your previous action is invalid.')
    assert main_fields(replies[3]) == Reply(dialects.AGENTGYM.wrong, success=False)
    assert main_fields(replies[4]) == Reply(dialects.AGENTGYM.right, 1.0, done=True, success=True)


def test_the_plain_dialect_is_short_and_its_oracle_writes_no_thoughts(corpus, question_file):
    play, replies = play_episode(
        corpus, question_file, 'Paris', '<search>Oslo</search>', '<search>x</search>', topk=1
    )
    assert replies[0].observation == 'What is the capital of France?'
    assert replies[1].observation == dialects.PLAIN.invalid
    assert [reply.valid for reply in replies[1:3]] == [False, True]
    assert replies[2].observation == 'Oslo is a capital too.'
    assert replies[3].observation == 'Nothing was found.'
    assert play.best() == '<search>What is the capital of France?</search>'
    play.step(play.best())
    assert play.best() == '<answer>Paris</answer>'
    assert main_fields(play.step(play.best())) == Reply('Right.', 1.0, done=True, success=True)


def test_an_oracle_solves_a_question_from_any_state():
    """After another search, the expert skipped its own and answered from unread documents."""
    play = Search(retries=False)
    item = next(i for i in items('train') if world.bank()[i].hops == 2)
    play.reset(item)
    first, second = play.question.queries
    play.step('<search>something else</search>')
    assert play.plan()[:2] == [f'<search>{first}</search>', f'<search>{second}</search>']
    play.step(play.best())
    assert play.best() == f'<search>{second}</search>'
    short = Search(retries=False, calls=2)
    short.reset(item)
    short.step('<search>something else</search>')
    assert len(short.plan()) == 1 and '<answer>' in short.best()


def test_drawn_questions_are_answered_only_by_their_documents():
    files = (drawn.NAME,)
    splits = [items(split, questions=files) for split in SPLITS]
    assert sorted(sum(splits, [])) == list(range(drawn.QUESTIONS)) and min(map(len, splits)) > 300
    countries = collections.defaultdict(set)  # region -> its countries
    play = Search(questions=files, retries=False, topk=1)
    for item in range(0, drawn.QUESTIONS, 32):
        first = play.reset(item)
        assert (first, play.question) == (play.reset(item), drawn.draw(item))
        search, answer = play.plan()
        reply = play.step(search)
        assert play.question.answers[0] in reply.observation and reply.figures[1] == 1
        assert len(play.question.documents) == drawn.DOCUMENTS
        region = first.split()[5]
        assert region in drawn.REGIONS and answer.count(play.question.answers[0]) == 1
        countries[region].add(play.question.answers[0])
        assert play.step(answer).success
    assert len(countries) == len(drawn.REGIONS) and min(map(len, countries.values())) > 2
    # Other questions' documents are not found
    absent = {*drawn.COUNTRIES} - {d['contents'].split()[-1][:-1] for d in play.question.documents}
    play.reset(item)
    assert play.step(f'<search>{min(absent)}</search>').observation == 'Nothing was found.'


def test_known_drawn_facts_are_the_same_in_every_question():
    known = 3
    fixed = dict(zip(drawn.REGIONS[:known], drawn.COUNTRIES, strict=False))
    countries = collections.defaultdict(set)
    for number in range(0, drawn.QUESTIONS, 16):
        question = drawn.draw(number, known)
        assert question.text == drawn.draw(number).text
        texts = [document['contents'].split() for document in question.documents]
        belongs = {text[0].strip('"'): text[-1][:-1] for text in texts}
        assert len(set(belongs.values())) == drawn.DOCUMENTS  # distinct within a question
        region = question.text.split()[5]
        assert question.answers == (belongs[region],)
        assert question.by_heart == (region in fixed)
        for region, country in belongs.items():
            countries[region].add(country)
    assert {region: {country} for region, country in fixed.items()}.items() <= countries.items()
    assert all(len(countries[region]) > 2 for region in drawn.REGIONS[known:])


def test_search_r1_ignores_text_after_a_search(corpus, question_file):
    _, replies = play_episode(
        corpus,
        question_file,
        '<search>Seine</search> <answer>Paris</answer>',
        '<answer>Lyon',
        '<search>Oslo</search>',
        dialect='search_r1',
        retries=False,
        turns=3,
        topk=1,
    )
    assert replies[0].observation.startswith('Answer the given question.')
    assert replies[1].observation == (
        '\n\n<information>Doc 1(Title: "Seine") The Seine flows through Paris.</information>\n\n'
    )
    assert replies[2].observation.startswith('\nMy previous action is invalid.')
    assert main_fields(replies[3]) == Reply('', done=True, success=False)


CALL = '<reasoning>\n?\n</reasoning>\n<tool>\n{}\n</tool>'


def test_mt_grpo_calls_a_tool_in_json_and_its_second_call_ends_the_episode(corpus, question_file):
    call = CALL.format('{"name": "wiki_search", "args": {"query": "Seine"}}')
    settings = dict(dialect='mt_grpo', rewards='mt_grpo', retries=False, calls=2)
    answer = '<reasoning>\n!\n</reasoning>\n<answer>\nParis\n</answer>'
    _, replies = play_episode(corpus, question_file, call, answer, **settings)
    assert replies[1].valid and replies[2].valid
    assert replies[1].observation == '<result>\nSeine\nThe Seine flows through Paris.\n</result>'
    assert [reply.reward for reply in replies] == pytest.approx([0, 0.7, 1.9])
    assert replies[2].done and replies[2].success
    assert replies[2].figures == (1.0, 1.0, 1.0, 1.0)
    _, replies = play_episode(corpus, question_file, 'what?', call, call, **settings)
    assert main_fields(replies[1]) == Reply(dialects.MT_GRPO.invalid, success=False)
    assert replies[3].done and not replies[3].success and replies[3].observation == ''
    assert replies[3].reward == pytest.approx(0.2 * (2.2 / 3 + 2 / 3))


def test_invalid_calls_are_errors_in_a_result(corpus, question_file):
    wrong = '{', '[1]', '{}', '{"name": "x"}', '{"name": "wiki_search", "args": {"q": "a"}}'
    for call in wrong:
        _, replies = play_episode(corpus, question_file, CALL.format(call), dialect='mt_grpo')
        assert replies[1].observation.startswith('<result>\nError: ') and not replies[1].done
        assert replies[1].figures == (0.0, 0.0, 0.0, 1.0)
