//! Streams on one node and from another: the same rules.

use crate::fabric::{Fabric, Two, node_name, over_every_fabric};
use crate::probe::{End, Order, start, until_restarted};
use crate::support::{PATIENCE, TRACE};
use starling_actors::{Address, Items, SendError, StreamError};
use std::sync::Arc;

over_every_fabric!(
    a_stream_yields_its_items_in_order_and_then_its_end,
    a_stream_that_was_not_finished_ends_with_an_error,
    a_slow_taker_holds_the_sink_back,
    dropping_the_items_tells_the_sink,
    a_stream_whose_link_goes_down_ends_with_an_error,
    a_refused_question_is_the_only_thing_in_its_stream,
);

/// The probe of `b`, from there and from `a`.
async fn both<F: Fabric>() -> (Two<F>, [Address<Order>; 2]) {
    let two = Two::<F>::linked().await;
    start(&two.b, "probe").await;
    let addresses = [two.b.address("probe"), two.a.remote(&node_name("b"), "probe")];
    (two, addresses)
}

async fn next(items: &mut Items<u64>) -> Option<Result<u64, StreamError>> {
    tokio::time::timeout(PATIENCE, items.next()).await.expect("the stream stands still")
}

async fn push(address: &Address<Order>, number: u64) -> u64 {
    address.ask(TRACE, PATIENCE, |reply| Order::Push(number, reply)).await.unwrap()
}

async fn until_pushed(address: &Address<Order>, number: u64, taken: u64) {
    let started = std::time::Instant::now();
    while push(address, number).await != taken {
        assert!(started.elapsed() < PATIENCE, "never taken {taken} times");
        tokio::task::yield_now().await;
    }
}

fn label(address: &Address<Order>) -> Arc<str> {
    let debug = format!("{address:?}");
    debug.split('"').nth(1).unwrap().into()
}

async fn a_stream_yields_its_items_in_order_and_then_its_end<F: Fabric>() {
    let (two, addresses) = both::<F>().await;
    for address in &addresses {
        for (items_max, count) in [(1, 100), (7, 1_000), (64, 1_000), (5, 0)] {
            let mut items = address.stream(TRACE, items_max, |sink| Order::Numbers(count, End::Finish, sink)).unwrap();
            for number in 0..count {
                assert_eq!(next(&mut items).await, Some(Ok(number)), "{address:?}");
            }
            assert_eq!(next(&mut items).await, None);
            assert_eq!(next(&mut items).await, None, "and stays ended");
        }
    }
    assert_eq!(two.a.link_stats()[0].open_asks, 0);
}

async fn a_stream_that_was_not_finished_ends_with_an_error<F: Fabric>() {
    let (two, addresses) = both::<F>().await;
    for (address, restarts) in addresses.iter().zip([0, 2]) {
        let mut items = address.stream(TRACE, 4, |sink| Order::Numbers(10, End::Drop, sink)).unwrap();
        for number in 0..10 {
            assert_eq!(next(&mut items).await, Some(Ok(number)));
        }
        let dropped = StreamError::Dropped { name: label(address) };
        assert_eq!(next(&mut items).await, Some(Err(dropped)));
        assert_eq!(next(&mut items).await, None);

        let mut items = address.stream(TRACE, 4, Order::PanicOnSink).unwrap();
        assert_eq!(next(&mut items).await, Some(Err(StreamError::Died { name: label(address) })));
        until_restarted(&two.b, "probe", restarts + 1).await;

        let mut items = address.stream(TRACE, 4, Order::KeepSink).unwrap();
        assert_eq!(push(address, 7).await, 1);
        address.tell(TRACE, Order::Panic).unwrap();
        assert_eq!(next(&mut items).await, Some(Ok(7)), "what came before the end comes first");
        let over = next(&mut items).await;
        assert!(matches!(over, Some(Err(StreamError::Died { .. } | StreamError::Dropped { .. }))), "{over:?}");
        until_restarted(&two.b, "probe", restarts + 2).await;
    }
}

async fn a_slow_taker_holds_the_sink_back<F: Fabric>() {
    let (_two, addresses) = both::<F>().await;
    for address in &addresses {
        let mut items = address.stream(TRACE, 4, Order::KeepSink).unwrap();
        for number in 0..4 {
            assert_eq!(push(address, number).await, 1);
        }
        assert_eq!(push(address, 4).await, 0, "four wait already");
        for number in 0..4 {
            assert_eq!(next(&mut items).await, Some(Ok(number)));
        }
        // The credit travels back by itself.
        until_pushed(address, 5, 1).await;
        assert_eq!(next(&mut items).await, Some(Ok(5)));
        address.tell(TRACE, Order::FinishSinks).unwrap();
        assert_eq!(next(&mut items).await, None);
    }
}

async fn dropping_the_items_tells_the_sink<F: Fabric>() {
    let (two, addresses) = both::<F>().await;
    for address in &addresses {
        let mut items = address.stream(TRACE, 1_000_000, Order::KeepSink).unwrap();
        assert_eq!(push(address, 1).await, 1);
        assert_eq!(next(&mut items).await, Some(Ok(1)));
        drop(items);
        until_pushed(address, 2, 0).await;
    }
    assert_eq!(two.a.link_stats()[0].open_asks, 0);
}

async fn a_stream_whose_link_goes_down_ends_with_an_error<F: Fabric>() {
    let (two, [at_home, address]) = both::<F>().await;
    let mut items = address.stream(TRACE, 4, Order::KeepSink).unwrap();
    assert_eq!(push(&address, 1).await, 1);
    two.fabric.cut("a", "b").await;
    two.are_apart().await;
    let mut taken = 0;
    let over = loop {
        match next(&mut items).await {
            Some(Ok(_)) => taken += 1,
            over => break over,
        }
    };
    assert!(taken <= 1);
    assert_eq!(over, Some(Err(StreamError::ConnectionLost { name: "probe@b".into() })));
    assert_eq!(next(&mut items).await, None);
    // The sink sees that nobody takes items any more.
    until_pushed(&at_home, 2, 0).await;
}

async fn a_refused_question_is_the_only_thing_in_its_stream<F: Fabric>() {
    let (two, _) = both::<F>().await;
    let nobody = two.b.address::<Order>("nobody").stream(TRACE, 4, Order::KeepSink);
    assert_eq!(nobody.unwrap_err(), SendError::NotRunning { name: "nobody".into() });
    let hidden = two.a.remote::<Order>(&node_name("b"), "hidden");
    let mut items = hidden.stream(TRACE, 4, Order::KeepSink).unwrap();
    let refused = SendError::NotExposed { name: "hidden@b".into() };
    assert_eq!(next(&mut items).await, Some(Err(StreamError::Undelivered(refused))));
    assert_eq!(next(&mut items).await, None);
}
